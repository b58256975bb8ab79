#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mok::rack {

// Bytes that have come from one rank to another, in all and by time.
struct Traffic {
  std::vector<double> bytes;  // [ranks, ranks] from, to
  std::vector<float> binned;  // [bins, ranks, ranks]

  void add(int32_t ranks, int32_t from, int32_t to, double count, size_t bin) {
    const size_t pairs = static_cast<size_t>(ranks) * ranks;
    const size_t pair = static_cast<size_t>(from) * ranks + to;
    if (binned.size() < (bin + 1) * pairs) {
      binned.resize((bin + 1) * pairs);
    }
    bytes[pair] += count;
    binned[bin * pairs + pair] += static_cast<float>(count);
  }
};

}  // namespace mok::rack
