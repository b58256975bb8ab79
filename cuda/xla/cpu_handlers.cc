#include "xla/cpu_handlers.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "core/plan.h"
#include "host/faults.h"
#include "host/mx.h"
#include "host/plan_builder.h"
#include "host/rendezvous.h"
#include "host/transfer.h"
#include "host/weighted_sum.h"
#include "xla/ffi/api/ffi.h"
#include "xla/mx_call.h"
#include "xla/plan_tables.h"

namespace mok {
namespace {

namespace ffi = xla::ffi;

using Int32Buffer = ffi::Buffer<ffi::S32>;

// Gives every call site of a program an identity of its own: two layers of one program may come to
// their meetings in different orders on different ranks.
struct CallSite {
  static ffi::TypeId id;
  int64_t number;
};
ffi::TypeId CallSite::id = {};

ffi::ErrorOr<std::unique_ptr<CallSite>> make_call_site() {
  static std::atomic<int64_t> next{0};
  return std::make_unique<CallSite>(CallSite{next.fetch_add(1)});
}

// `place` is [group, rank]: device ordinals say nothing about the mesh.
int32_t group_of(Int32Buffer place) { return place.typed_data()[0]; }
int32_t rank_of(Int32Buffer place) { return place.typed_data()[1]; }

MeetingKey key_of(const CallSite* site, ffi::RunId run, Int32Buffer place) {
  return {site->number, run.run_id, group_of(place)};
}

Done completer(ffi::Promise promise) {
  return [promise](const std::string& error) mutable {
    if (error.empty()) {
      promise.SetAvailable();
    } else {
      promise.SetError(ffi::Error(ffi::ErrorCode::kDeadlineExceeded, error));
    }
  };
}

struct PlanAttributes {
  int32_t ranks;
  int32_t experts;
  int32_t tile_rows;
  int64_t chunk_rows;
  double timeout_s;

  PlanShape shape(int64_t tokens, int64_t top_k) const {
    return {ranks, tokens, static_cast<int32_t>(top_k), experts, tile_rows, chunk_rows};
  }
};

void report_out_of_range(const PlanShape& shape, int32_t group, const RankTables& output) {
  if (const int32_t choices = output.tables.counts[kOutOfRange]) {
    record_fault({FaultKind::kExpertOutOfRange, Operation::kPlan, group, output.rank, /*peer=*/-1,
                  shape.experts, choices});
  }
}

struct PlanSeat {
  const int32_t* ids;
  RankTables output;
};

// ids is this rank's [tokens, top_k].
ffi::Future plan(CallSite* site, ffi::RunId run, Int32Buffer ids, Int32Buffer place,
                 ffi::RemainingRets tables, PlanAttributes attributes) {
  const PlanShape shape = attributes.shape(ids.dimensions()[0], ids.dimensions()[1]);
  const int32_t rank = rank_of(place);
  ffi::Promise promise;
  ffi::Future future(promise);
  meet(
      key_of(site, run, place),
      {Operation::kPlan, rank, shape.ranks, std::chrono::duration<double>(attributes.timeout_s)},
      PlanSeat{ids.typed_data(), {rank, plan_tables(tables)}}, /*tasks=*/1,
      [shape, group = group_of(place)](std::span<const PlanSeat* const> seats, int) {
        std::vector<const int32_t*> routes;
        std::vector<RankTables> outputs;
        for (const PlanSeat* seat : seats) {
          routes.push_back(seat->ids);
          outputs.push_back(seat->output);
        }
        build_plans(shape, routes, outputs);
        for (const RankTables& output : outputs) {
          report_out_of_range(shape, group, output);
        }
      },
      completer(promise));
  return future;
}

// ids is every rank's, [ranks, tokens, top_k].
ffi::Error plan_of_gathered_routes(Int32Buffer ids, Int32Buffer place, ffi::RemainingRets tables,
                                   PlanAttributes attributes) {
  const PlanShape shape = attributes.shape(ids.dimensions()[1], ids.dimensions()[2]);
  std::vector<const int32_t*> routes;
  for (int32_t rank = 0; rank < shape.ranks; ++rank) {
    routes.push_back(ids.typed_data() + rank * shape.choices());
  }
  const RankTables output{rank_of(place), plan_tables(tables)};
  build_plans(shape, routes, std::span(&output, 1));
  report_out_of_range(shape, group_of(place), output);
  return ffi::Error::Success();
}

struct MoveAttributes {
  Operation operation;
  bool push;
  int32_t ranks;
  int64_t choices;
  int32_t tile_rows;
  int64_t ring_rows;
  int64_t chunk_rows;
  double timeout_s;

  // `home` is the array on the home rank's side: a row a token or a row a choice.
  TransferShape shape(ffi::AnyBuffer home) const {
    const int64_t rows = home.dimensions()[0];
    return {ranks,
            choices,
            choices / rows,
            tile_rows,
            {ring_rows, chunk_rows},
            home.size_bytes() / rows};
  }
  Attendance attendance(int32_t rank) const {
    return {operation, rank, ranks, std::chrono::duration<double>(timeout_s)};
  }
};

PlanView plan_view(Int32Buffer row_source, Int32Buffer pull_order, Int32Buffer slot_rank,
                   Int32Buffer slot_row, Int32Buffer counts) {
  return {row_source.typed_data(), pull_order.typed_data(), slot_rank.typed_data(),
          slot_row.typed_data(), counts.typed_data()};
}

ffi::Future dispatch(CallSite* site, ffi::RunId run, ffi::AnyBuffer values, Int32Buffer row_source,
                     Int32Buffer pull_order, Int32Buffer slot_rank, Int32Buffer slot_row,
                     Int32Buffer counts, Int32Buffer wave, Int32Buffer place,
                     ffi::Result<ffi::AnyBuffer> ring, MoveAttributes attributes) {
  ffi::Promise promise;
  ffi::Future future(promise);
  meet(
      key_of(site, run, place), attributes.attendance(rank_of(place)),
      DispatchSeat{static_cast<const std::byte*>(values.untyped_data()),
                   static_cast<std::byte*>(ring->untyped_data()),
                   plan_view(row_source, pull_order, slot_rank, slot_row, counts),
                   wave.typed_data()[0]},
      /*tasks=*/attributes.ranks,
      [shape = attributes.shape(values), push = attributes.push](DispatchSeats seats, int rank) {
        (push ? dispatch_push : dispatch_pull)(shape, seats, rank);
      },
      completer(promise));
  return future;
}

ffi::Future combine(CallSite* site, ffi::RunId run, ffi::AnyBuffer ring, ffi::AnyBuffer slots_in,
                    Int32Buffer row_source, Int32Buffer pull_order, Int32Buffer slot_rank,
                    Int32Buffer slot_row, Int32Buffer counts, Int32Buffer wave, Int32Buffer place,
                    ffi::Result<ffi::AnyBuffer> slots, MoveAttributes attributes) {
  // XLA aliases the two where it can; where it cannot, earlier waves' slots come along here.
  if (slots->untyped_data() != slots_in.untyped_data()) {
    std::memcpy(slots->untyped_data(), slots_in.untyped_data(), slots_in.size_bytes());
  }
  ffi::Promise promise;
  ffi::Future future(promise);
  meet(
      key_of(site, run, place), attributes.attendance(rank_of(place)),
      CombineSeat{static_cast<const std::byte*>(ring.untyped_data()),
                  static_cast<std::byte*>(slots->untyped_data()),
                  plan_view(row_source, pull_order, slot_rank, slot_row, counts),
                  wave.typed_data()[0]},
      /*tasks=*/attributes.ranks,
      [shape = attributes.shape(slots_in), push = attributes.push](CombineSeats seats, int rank) {
        (push ? combine_push : combine_pull)(shape, seats, rank);
      },
      completer(promise));
  return future;
}

template <typename T>
void sum_slots(ffi::AnyBuffer slots, Int32Buffer slot_rank, ffi::Buffer<ffi::F32> weights,
               ffi::AnyBuffer out) {
  weighted_sum(static_cast<const T*>(slots.untyped_data()), slot_rank.typed_data(),
               weights.typed_data(), weights.dimensions()[0], weights.dimensions()[1],
               out.dimensions()[1], static_cast<T*>(out.untyped_data()));
}

ffi::Error weighted_sum_of_slots(ffi::AnyBuffer slots, Int32Buffer slot_rank,
                                 ffi::Buffer<ffi::F32> weights, ffi::Result<ffi::AnyBuffer> out) {
  const bool is_f32 = slots.element_type() == ffi::F32;
  (is_f32 ? sum_slots<float> : sum_slots<BFloat16>)(slots, slot_rank, weights, *out);
  return ffi::Error::Success();
}

ffi::Error quantize(ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> elements,
                    ffi::Result<ffi::AnyBuffer> scales) {
  const auto run = [&]<typename T>(const T* typed) {
    mx_quantize(typed, mx_shape(values), bytes(*elements), bytes(*scales));
  };
  if (values.element_type() == ffi::F32) {
    run(static_cast<const float*>(values.untyped_data()));
  } else {
    run(static_cast<const BFloat16*>(values.untyped_data()));
  }
  return ffi::Error::Success();
}

ffi::Error dequantize(ffi::AnyBuffer elements, ffi::AnyBuffer scales,
                      ffi::Result<ffi::AnyBuffer> values) {
  const auto run = [&]<typename T>(T* typed) {
    mx_dequantize(bytes(elements), bytes(scales), mx_shape(elements), typed);
  };
  if (values->element_type() == ffi::F32) {
    run(static_cast<float*>(values->untyped_data()));
  } else {
    run(static_cast<BFloat16*>(values->untyped_data()));
  }
  return ffi::Error::Success();
}

// There may be a second result, in the dtype of the first one: with blocks along `inner`.
ffi::Error round(ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> rounded,
                 ffi::RemainingRets others) {
  const MxShape shape = mx_shape(values);
  const auto round_to = [&]<typename From, typename To>(const From* from, std::type_identity<To>) {
    mx_round(from, shape, static_cast<To*>(rounded->untyped_data()));
    if (void* const across = rounded_across(others)) {
      mx_round(from, {shape.outer * shape.length, shape.inner, 1}, static_cast<To*>(across));
    }
  };
  const auto round_from = [&]<typename From>(const From* from) {
    if (rounded->element_type() == ffi::F32) {
      round_to(from, std::type_identity<float>{});
    } else {
      round_to(from, std::type_identity<BFloat16>{});
    }
  };
  if (values.element_type() == ffi::F32) {
    round_from(static_cast<const float*>(values.untyped_data()));
  } else {
    round_from(static_cast<const BFloat16*>(values.untyped_data()));
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mok

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(mok::Operation);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(mok::PlanAttributes, xla::ffi::StructMember<int32_t>("ranks"),
                                      xla::ffi::StructMember<int32_t>("experts"),
                                      xla::ffi::StructMember<int32_t>("tile_rows"),
                                      xla::ffi::StructMember<int64_t>("chunk_rows"),
                                      xla::ffi::StructMember<double>("timeout_s"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    mok::MoveAttributes, xla::ffi::StructMember<mok::Operation>("operation"),
    xla::ffi::StructMember<bool>("push"), xla::ffi::StructMember<int32_t>("ranks"),
    xla::ffi::StructMember<int64_t>("choices"), xla::ffi::StructMember<int32_t>("tile_rows"),
    xla::ffi::StructMember<int64_t>("ring_rows"), xla::ffi::StructMember<int64_t>("chunk_rows"),
    xla::ffi::StructMember<double>("timeout_s"));

namespace mok {
namespace {

XLA_FFI_DEFINE_HANDLER(call_site_handler, make_call_site, ffi::Ffi::BindInstantiate());

XLA_FFI_DEFINE_HANDLER(plan_handler, plan,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::RunId>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .RemainingRets()
                           .Attrs<PlanAttributes>());

XLA_FFI_DEFINE_HANDLER(
    plan_of_gathered_routes_handler, plan_of_gathered_routes,
    ffi::Ffi::Bind().Arg<Int32Buffer>().Arg<Int32Buffer>().RemainingRets().Attrs<PlanAttributes>());

XLA_FFI_DEFINE_HANDLER(dispatch_handler, dispatch,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::RunId>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attrs<MoveAttributes>());

XLA_FFI_DEFINE_HANDLER(combine_handler, combine,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CallSite>>()
                           .Ctx<ffi::RunId>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attrs<MoveAttributes>());

XLA_FFI_DEFINE_HANDLER(weighted_sum_handler, weighted_sum_of_slots,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<Int32Buffer>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(
    quantize_handler, quantize,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(
    dequantize_handler, dequantize,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(
    round_handler, round,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().RemainingRets());

constexpr XLA_FFI_TypeInfo kCallSiteType = ffi::MakeTypeInfo<CallSite>();

}  // namespace
}  // namespace mok

extern "C" {

XLA_FFI_Error* MokCallSite(XLA_FFI_CallFrame* frame) {
  // XLA wants the state's type known before the handler, and JAX registers handlers before types
  // when its CPU client starts; the first query of the handler's metadata is early enough.
  static std::mutex mutex;
  {
    const std::lock_guard lock(mutex);
    if (mok::CallSite::id.type_id == 0) {
      if (XLA_FFI_Error* error = xla::ffi::Ffi::RegisterTypeId(
              frame->api, "jax_mok_call_site", &mok::CallSite::id, &mok::kCallSiteType)) {
        return error;
      }
    }
  }
  return mok::call_site_handler(frame);
}

XLA_FFI_Error* MokPlan(XLA_FFI_CallFrame* frame) { return mok::plan_handler(frame); }
XLA_FFI_Error* MokPlanOfGatheredRoutes(XLA_FFI_CallFrame* frame) {
  return mok::plan_of_gathered_routes_handler(frame);
}
XLA_FFI_Error* MokDispatch(XLA_FFI_CallFrame* frame) { return mok::dispatch_handler(frame); }
XLA_FFI_Error* MokCombine(XLA_FFI_CallFrame* frame) { return mok::combine_handler(frame); }
XLA_FFI_Error* MokWeightedSum(XLA_FFI_CallFrame* frame) { return mok::weighted_sum_handler(frame); }
XLA_FFI_Error* MokQuantize(XLA_FFI_CallFrame* frame) { return mok::quantize_handler(frame); }
XLA_FFI_Error* MokDequantize(XLA_FFI_CallFrame* frame) { return mok::dequantize_handler(frame); }
XLA_FFI_Error* MokRound(XLA_FFI_CallFrame* frame) { return mok::round_handler(frame); }

}  // extern "C"
