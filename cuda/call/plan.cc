#include "call/plan.h"

#include "call/device.h"
#include "call/launches.h"
#include "call/parts.h"
#include "call/peers.h"
#include "core/signature.h"
#include "link/exchange.h"
#include "sm90/finish.h"
#include "sm90/plan.h"

namespace mok {
namespace {

struct Workspace {
  int32_t* scratch;  // [plan_scratch_words]
  int32_t* routes;   // [ranks, tokens, top_k]; only with peers, and not if they come gathered

  // Set to zero before a call: zero_bytes from `zero` on.
  char* zero;
  int64_t zero_bytes;
  int32_t* link_failed;
  int32_t* kernel_failed;  // set if a launch has failed: no kernel of this call waits for another

  int64_t bytes;
};

Workspace lay_out(const PlanShape& shape, char* base) {
  Parts parts(base);
  Workspace space{};
  space.scratch = parts.take<int32_t>(sm90::plan_scratch_words(shape));
  space.routes = shape.ranks == 1 ? nullptr : parts.take<int32_t>(shape.ranks * shape.choices());
  const int64_t zero_begin = parts.used();
  space.zero = parts.take<char>(0);
  space.link_failed = parts.take<int32_t>(1);
  space.kernel_failed = parts.take<int32_t>(1);
  space.zero_bytes = parts.used() - zero_begin;
  space.bytes = parts.used();
  return space;
}

// The tables of `rank`, or of the one that `source.rank` points to.
void fill_tables(Launches& launch, const PlanShape& shape, int32_t rank,
                 const sm90::PlanSource& source, const PlanTables& tables, const Workspace& space,
                 CallRecord* record, cudaStream_t stream) {
  launch("plan", sm90::build_plan(shape, rank, source, tables, stream));
  launch("finish", sm90::finish({.link_failed = space.link_failed,
                                 .kernel_failed = space.kernel_failed,
                                 .counts = tables.counts,
                                 .experts = shape.experts,
                                 .results = {},
                                 .kept_plan = nullptr,
                                 .record = record},
                                stream));
}

}  // namespace

bool plan_call_fits(const PlanShape& shape) { return sm90::plan_fits(shape); }

int64_t plan_workspace_bytes(const PlanShape& shape) { return lay_out(shape, nullptr).bytes; }

ArenaLayout plan_arena_layout(const PlanShape& shape) {
  return {.ranks = shape.ranks, .choices = shape.choices(), .tokens = shape.tokens};
}

std::string launch_plan_call(const PlanCall& call, int32_t ordinal, cudaStream_t stream) {
  const PlanShape& shape = call.shape;
  const ArenaLayout layout = plan_arena_layout(shape);
  const Arena* arena = nullptr;
  if (std::string problem = find_peers(call.communicator, layout, &arena); !problem.empty()) {
    return problem;
  }
  const Workspace space = lay_out(shape, call.workspace.data);
  if (call.workspace.bytes < space.bytes) {
    return "the workspace is too small";
  }
  CallRecord* const record = device_of(ordinal).record;
  const MeetingTerms terms{
      .signature = signature_of(CallKind::kPlan, shape, /*directions=*/{}, 0, 0, /*is_mx=*/false),
      .timeout_ns = call.timeout_ns,
      .kernel_failed = space.kernel_failed,
      .failed = space.link_failed,
      .record = record};

  count_launched_call();
  Launches launch;
  launch("zero", cudaMemsetAsync(space.zero, 0, space.zero_bytes, stream));
  sm90::PlanSource source{.routes = call.ids, .scratch = space.scratch, .to_pull = nullptr};
  int32_t rank = 0;
  if (arena != nullptr) {
    launch("publish", publish_tokens(*arena, shape, call.ids, /*x=*/{}, terms, stream));
    // Before the exit: behind it a peer's next call may overwrite the routes in this rank's arena.
    // Only there is it known whether one has done so before, having waited in vain for this rank.
    launch("routes", cudaMemcpyAsync(space.routes, arena->own + layout.choices_offset(),
                                     sizeof(int32_t) * shape.ranks * shape.choices(),
                                     cudaMemcpyDeviceToDevice, stream));
    if (launch.failed()) {  // the peers have not got this rank's routes
      cudaMemsetAsync(space.kernel_failed, 1, sizeof(int32_t), stream);
    }
    launch("exit", meet_at_exit(*arena, terms, stream));
    source.routes = space.routes;
    source.copy = space.routes;
    source.failed = space.link_failed;
    rank = arena->rank;
  }
  fill_tables(launch, shape, rank, source, call.tables, space, record, stream);
  return launch.result();
}

std::string launch_gathered_plan_call(const GatheredPlanCall& call, int32_t ordinal,
                                      cudaStream_t stream) {
  const Workspace space = lay_out(call.shape, call.workspace.data);
  if (call.workspace.bytes < space.bytes) {
    return "the workspace is too small";
  }
  Launches launch;
  launch("zero", cudaMemsetAsync(space.zero, 0, space.zero_bytes, stream));
  fill_tables(launch, call.shape, /*rank=*/-1,
              {.routes = call.ids, .scratch = space.scratch, .to_pull = nullptr, .rank = call.rank},
              call.tables, space, device_of(ordinal).record, stream);
  return launch.result();
}

}  // namespace mok
