#include "link/load_kernels.h"
#include "sm90/addresses.h"

namespace mok::sm90 {
namespace {

constexpr int kThreads = 256;

__global__ void fill_addresses_kernel(AddressParams params) {
  for (int32_t rank = threadIdx.x; rank < params.ranks; rank += blockDim.x) {
    params.x[rank] =
        rank == params.rank ? params.own_x : params.received + rank * params.tokens_elements;
    params.slots[rank] =
        params.bases == nullptr
            ? params.own_slots
            : reinterpret_cast<uint16_t*>(params.bases[rank] + params.slots_offset);
  }
}

}  // namespace

cudaError_t fill_addresses(const AddressParams& params, cudaStream_t stream) {
  fill_addresses_kernel<<<1, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t load_addresses() { return load_kernels(fill_addresses_kernel); }

}  // namespace mok::sm90
