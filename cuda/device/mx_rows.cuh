#pragma once

#include <cstdint>

#include "core/mx_floats.h"
#include "device/warp.cuh"

// Rows of tokens to MXFP8 and back, by a warp. All lanes call these functions. Encoded rows begin
// at multiples of 16 bytes and have `mx_row_bytes`; widths are multiples of 64.
namespace mok {

constexpr int kLaneElements = 8;  // of a row, that a lane takes together: four lanes have a block
constexpr int kWarpElements = kWarp * kLaneElements;

// The largest of four neighbouring lanes' numbers, in all of them.
__device__ inline float largest_of_quad(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}

__device__ inline bool any_of_warp(bool condition) { return __any_sync(kAllLanes, condition); }

// Rounds a row of bf16, each value of which becomes an element and the bf16 that this one stands
// for. Either is left out if its place is null.
__device__ inline void round_row(const uint16_t* from, int32_t width, char* encoded,
                                 uint16_t* rounded) {
  constexpr int kAtOnce = 2;
  const int lane = threadIdx.x % kWarp;
  for (int begin = 0; begin < width; begin += kAtOnce * kWarpElements) {
    uint4 loaded[kAtOnce];
    const auto place_of = [&](int i) { return begin + i * kWarpElements + lane * kLaneElements; };
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      loaded[i] =
          place_of(i) < width ? *reinterpret_cast<const uint4*>(from + place_of(i)) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i * kWarpElements < width) {
        const uint32_t words[] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
        float values[1][kLaneElements];
#pragma unroll
        for (int j = 0; j < kLaneElements; ++j) {
          const uint32_t word = words[j / 2];
          values[0][j] = __uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
        }
        uint32_t elements[kLaneElements / 4];
        const uint8_t scale = mx_encode(values, largest_of_quad, any_of_warp, elements);
        const int place = place_of(i);
        if (place < width && encoded != nullptr) {
          *reinterpret_cast<uint2*>(encoded + place) = {elements[0], elements[1]};
          if (lane % 4 == 0) {
            encoded[width + place / kMxBlock] = static_cast<char>(scale);
          }
        }
        if (place < width && rounded != nullptr) {
          uint32_t low[2], high[2];
          mx_decode(elements[0], scale, low);
          mx_decode(elements[1], scale, high);
          *reinterpret_cast<uint4*>(rounded + place) = {low[0], low[1], high[0], high[1]};
        }
      }
    }
  }
}

// What a lane loads of a piece of an encoded row: elements in four places, so that a byte a lane is
// the scales of all of them.
struct MxPiece {
  static constexpr int kPlaces = 4;
  static constexpr int kElements = kPlaces * kWarpElements;

  uint2 elements[kPlaces];
  uint32_t scale;  // of the piece's `lane`-th block
};

__host__ __device__ inline int mx_pieces(int32_t width) {
  return (width + MxPiece::kElements - 1) / MxPiece::kElements;
}

// Nobody may write the row during the kernel.
__device__ inline MxPiece load_piece(const char* row, int32_t width, int index) {
  const int lane = threadIdx.x % kWarp;
  const int begin = index * MxPiece::kElements;
  MxPiece piece{};
#pragma unroll
  for (int i = 0; i < MxPiece::kPlaces; ++i) {
    const int place = begin + i * kWarpElements + lane * kLaneElements;
    if (place < width) {
      asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                   : "=r"(piece.elements[i].x), "=r"(piece.elements[i].y)
                   : "l"(row + place));
    }
  }
  const int block = begin / kMxBlock + lane;
  if (block < width / kMxBlock) {
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];"
                 : "=r"(piece.scale)
                 : "l"(row + width + block));
  }
  return piece;
}

// Writes its values in bf16.
__device__ inline void store_piece(const MxPiece& piece, uint16_t* to, int32_t width, int index) {
  const int lane = threadIdx.x % kWarp;
  const int begin = index * MxPiece::kElements;
#pragma unroll
  for (int i = 0; i < MxPiece::kPlaces; ++i) {
    const int place = begin + i * kWarpElements + lane * kLaneElements;
    constexpr int kBlocks = kWarpElements / kMxBlock;
    const uint32_t scale = __shfl_sync(kAllLanes, piece.scale, i * kBlocks + lane / 4);
    uint32_t low[2], high[2];
    mx_decode(piece.elements[i].x, static_cast<uint8_t>(scale), low);
    mx_decode(piece.elements[i].y, static_cast<uint8_t>(scale), high);
    if (place < width) {
      *reinterpret_cast<uint4*>(to + place) = {low[0], low[1], high[0], high[1]};
    }
  }
}

}  // namespace mok
