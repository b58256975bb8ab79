#pragma once

namespace mok {

// Who moves a row: the rank that needs it (pull) or the one that has it (push). Tokens go from
// their home ranks to the experts', output rows back.
struct Directions {
  bool dispatch_push = false;
  bool combine_push = true;

  bool operator==(const Directions&) const = default;
};

}  // namespace mok
