#pragma once

namespace mok {

// Who moves a row: the rank that needs it (pull) or the one that has it (push). Tokens go from
// their home ranks to the experts', output rows back. In the backward pass tokens go once more, the
// output's gradients go as they do, the input's gradients back.
struct Directions {
  bool dispatch_push;
  bool combine_push;
  bool reverse_combine_push;
  bool reverse_dispatch_push;
};

}  // namespace mok
