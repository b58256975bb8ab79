#pragma once

#include <cstdint>

namespace mok {

// Cuts a buffer into parts, each aligned to 256 bytes; with a null base it only counts.
class Parts {
 public:
  explicit Parts(char* base) : base_(base) {}

  template <typename T>
  T* take(int64_t count) {
    char* const part = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return reinterpret_cast<T*>(part);
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace mok
