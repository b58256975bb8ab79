#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mok::sm90 {

// Fills the forward kernel's address tables. Without peers `bases` is null; with them, x of a peer
// lies in `received`, and a rank's home slots at `slots_offset` of its arena.
struct AddressParams {
  const uint16_t** x;
  uint16_t** slots;
  int32_t ranks;
  int32_t rank;
  const uint16_t* own_x;
  const uint16_t* received;
  int64_t tokens_elements;  // tokens * hidden
  uint16_t* own_slots;
  char* const* bases;
  int64_t slots_offset;
};

cudaError_t fill_addresses(const AddressParams& params, cudaStream_t stream);

// Loads the kernels onto the current device.
cudaError_t load_addresses();

}  // namespace mok::sm90
