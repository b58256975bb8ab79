#pragma once

#include <cute/tensor.hpp>

#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"

// The main loop of one warpgroup: 64 rows times all panels of B, or times half of them.
namespace mok::sm90 {

constexpr int kAccumulators = kTileRows * kBlockColumns / kWarpgroup;  // f32 a thread

// Gathered rows are written through the generic proxy and read by wgmma through the async one; PTX
// promises their order only behind this fence. Measured cost: 0.6 to 1.6 % of a burst.
__device__ inline void fence_proxies_of_gather() { asm volatile("fence.proxy.async.shared::cta;"); }

using Major = cute::GMMA::Major;

template <int kColumns, Major kMajorA, Major kMajorB>
struct Products;
template <Major kMajorA, Major kMajorB>
struct Products<kBlockColumns, kMajorA, kMajorB> {
  using Atom = cute::SM90_64x256x16_F32BF16BF16_SS<kMajorA, kMajorB>;
};
template <Major kMajorA, Major kMajorB>
struct Products<kBlockColumns / 2, kMajorA, kMajorB> {
  using Atom = cute::SM90_64x128x16_F32BF16BF16_SS<kMajorA, kMajorB>;
};

// How a stage holds kRows (or columns) of an operand: 128 bytes of the contraction each, or panels
// of 64 of them for each step of it.
template <int kRows, Major kMajor>
struct StageLayout {
  using Type =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                   cute::Shape<cute::Int<kRows>, cute::Int<kBlockDepth>>{}));
};
template <int kRows>
struct StageLayout<kRows, Major::MN> {
  using Type = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                            cute::Shape<cute::Int<kRows>, cute::Int<kBlockDepth>>{},
                                            cute::Step<cute::_2, cute::_1>{}));
};

// Writes the products of `steps` stages, the first of which is full, to the first kColumns / 2
// accumulators, or adds them to what these hold if `kAdds`. `row_half` and `column_half` say which
// part of a stage this warpgroup takes. `meanwhile` runs when there are products enough under way
// to cover a trip to memory.
template <int kColumns, Major kMajorA, Major kMajorB, bool kAdds, typename Meanwhile>
__device__ __forceinline__ void multiply(SharedStorage& shared, StageCursor& cursor, Watch& watch,
                                         int steps, int row_half, int column_half,
                                         float (&accumulators)[kAccumulators],
                                         const Meanwhile& meanwhile) {
  using namespace cute;
  using LayoutA = typename StageLayout<kTileRows, kMajorA>::Type;
  using LayoutB = typename StageLayout<kColumns, kMajorB>::Type;
  auto mma = make_tiled_mma(typename Products<kColumns, kMajorA, kMajorB>::Atom{});
  const auto slice = mma.get_slice(0);
  const auto layout_c = partition_fragment_C(mma, Shape<Int<kTileRows>, Int<kColumns>>{}).layout();
  auto c = make_tensor(&accumulators[0], layout_c);

  const auto issue = [&] {
    fence_proxies_of_gather();
    const Element* const rows = shared.a[cursor.index] + row_half * kTileRows * kBlockDepth;
    const Element* const panels = shared.b[cursor.index][0] + column_half * kColumns * kBlockDepth;
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
  const auto release = [&](int stage) { release_stage(shared.empty[stage], watch); };

  mma.accumulate_ = kAdds ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
  if constexpr (kAdds) {
    warpgroup_fence_operand(c);
  }
  issue();
  if constexpr (kAdds) {
    // Accumulators that have been written in the ordinary way may not be those of a pipelined loop:
    // ptxas would serialise it (C7515).
    warpgroup_wait<0>();
  }
  int previous = cursor.index;
  cursor.advance();
  for (int step = 1; step < steps; ++step) {
    wait(shared.full[cursor.index], cursor.parity, watch);
    issue();
    if (step == 1) {
      meanwhile();
    }
    warpgroup_wait<1>();
    release(previous);
    previous = cursor.index;
    cursor.advance();
  }
  warpgroup_wait<0>();
  release(previous);
  // Keeps ptxas from moving the accumulators' first readers up among the products, which it would
  // then serialise (C7511).
  warpgroup_fence_operand(c);
}

}  // namespace mok::sm90
