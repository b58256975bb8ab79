#pragma once

#include <cstdint>

// PTX's mbarrier, which counts arrivals and bytes. Here a copy has one byte.
struct Mbarrier {
  uint8_t expected;  // arrivals of a phase
  uint8_t missing;   // of the phase under way
  int8_t bytes;      // announced and not come; less than none if they come before that
  uint8_t parity;    // of the phase under way
  uint8_t overrun;   // 1 after more arrivals than it missed, which PTX leaves undefined

  void init(uint8_t arrivals) { *this = {arrivals, arrivals, 0, 0, 0}; }

  // What try_wait tells: whether the phase before the one under way has that parity, which is all
  // that it knows of a phase. The first one seems to come after an odd one.
  bool has_ended(int waited_parity) const { return parity != waited_parity; }

  void announce(int copies) { bytes = static_cast<int8_t>(bytes + copies); }

  void arrive(int arrivals) {
    if (missing < arrivals) {
      overrun = 1;
      return;
    }
    missing = static_cast<uint8_t>(missing - arrivals);
    end_phase();
  }

  void receive_copy() {
    --bytes;
    end_phase();
  }

 private:
  void end_phase() {
    if (missing == 0 && bytes == 0) {
      missing = expected;
      parity ^= 1;
    }
  }
};
