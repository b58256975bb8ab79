#pragma once

#include <cute/tensor.hpp>

#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"

// The main loop of one warpgroup: 64 rows times all panels of B, or times half of them.
namespace mok::sm90 {

constexpr int kAccumulators = kTileRows * kBlockColumns / kWarpgroup;  // f32 a thread

// A is K-major; B lies as in memory, [depth, columns], hence MN-major.
// Rows gathered by ordinary copies are read by wgmma, through the other proxy.
#ifndef MOK_GATHER_FENCE
#define MOK_GATHER_FENCE 0
#endif
__device__ inline void fence_proxies_of_gather() {
#if MOK_GATHER_FENCE
  fence_proxies_shared();
#endif
}

template <int kColumns>
struct Products;
template <>
struct Products<kBlockColumns> {
  using Atom = cute::SM90_64x256x16_F32BF16BF16_SS<cute::GMMA::Major::K, cute::GMMA::Major::MN>;
};
template <>
struct Products<kBlockColumns / 2> {
  using Atom = cute::SM90_64x128x16_F32BF16BF16_SS<cute::GMMA::Major::K, cute::GMMA::Major::MN>;
};

// Writes the products of `steps` stages to the first kColumns / 2 accumulators. `row_half` and
// `column_half` say which part of a stage this warpgroup takes. Once the first products are
// under way, `meanwhile` runs; if they cannot start at once, `before_waiting` does.
template <int kColumns, int kCluster, typename BeforeWaiting, typename Meanwhile>
__device__ void multiply(SharedStorage& shared, Cursor& cursor, Watch& watch, int steps,
                         int row_half, int column_half, float (&accumulators)[kAccumulators],
                         const BeforeWaiting& before_waiting, const Meanwhile& meanwhile) {
  using namespace cute;
  using LayoutA = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                         Shape<Int<kTileRows>, Int<kBlockDepth>>{}));
  using LayoutB = decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                                         Shape<Int<kColumns>, Int<kBlockDepth>>{}, Step<_2, _1>{}));
  auto mma = make_tiled_mma(typename Products<kColumns>::Atom{});
  const auto slice = mma.get_slice(0);
  const auto layout_c = partition_fragment_C(mma, Shape<Int<kTileRows>, Int<kColumns>>{}).layout();
  auto c = make_tensor(&accumulators[0], layout_c);
  const int lane = threadIdx.x % kWarp;

  const auto issue = [&] {
    fence_proxies_of_gather();
    const Element* const rows = shared.a[cursor.stage] + row_half * kTileRows * kBlockDepth;
    const Element* const panels = shared.b[cursor.stage][0] + column_half * kColumns * kBlockDepth;
    const auto a =
        slice.make_fragment_A(slice.partition_A(make_tensor(make_smem_ptr(rows), LayoutA{})));
    const auto b =
        slice.make_fragment_B(slice.partition_B(make_tensor(make_smem_ptr(panels), LayoutB{})));
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < size<2>(a); ++k) {
      cute::gemm(mma, a(_, _, k), b(_, _, k), c);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };
  const auto release = [&](int stage) {
    if (lane < kCluster) {
      kCluster == 1 ? shared.empty[stage].arrive() : shared.empty[stage].arrive(lane);
    }
  };

  mma.accumulate_ = GMMA::ScaleOut::Zero;
  if (!__all_sync(~0u, shared.full[cursor.stage].test_wait(cursor.parity))) {
    before_waiting();
    wait(shared.full[cursor.stage], cursor.parity, watch);
  }
  issue();
  meanwhile();
  int previous = cursor.stage;
  cursor.advance();
  for (int step = 1; step < steps; ++step) {
    wait(shared.full[cursor.stage], cursor.parity, watch);
    issue();
    warpgroup_wait<1>();
    release(previous);
    previous = cursor.stage;
    cursor.advance();
  }
  warpgroup_wait<0>();
  release(previous);
}

}  // namespace mok::sm90
