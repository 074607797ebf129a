// A plan cut into tasks.
#include "distckpt/plan/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

namespace ferry::distckpt {
namespace schedule_test {

constexpr std::int64_t kTaskElements = kTaskBytes / 2;  // of BF16

// A tensor that lies whole at `offset` of a storage.
PlannedTensor whole(std::string name,
                    const Shape& shape,
                    std::int64_t offset,
                    StorageId storage = 0) {
  PlannedTensor planned{.tensor = {.name = std::move(name), .shape = shape}};
  planned.source = {
      {.box = Box::whole(shape), .at = {.storage = storage, .offset = offset, .strides = {2}}}};
  return planned;
}

std::int64_t bytes_of(const Segment& segment) {
  return (segment.end - segment.begin) * (segment.kind == Segment::Kind::kTensor ? 1 : 2);
}

// Every task is at most kTaskBytes long, and tasks hold the segments one after another.
void expect_tasks_hold_all_segments(const Schedule& schedule) {
  std::uint32_t next = 0;
  for (const auto& task : schedule.tasks) {
    EXPECT_EQ(task.first, next);
    EXPECT_GT(task.count, 0U);
    std::int64_t bytes = 0;
    for (std::uint32_t i = 0; i < task.count; ++i)
      bytes += bytes_of(schedule.segments[task.first + i]);
    EXPECT_LE(bytes, kTaskBytes);
    next += task.count;
  }
  EXPECT_EQ(next, schedule.segments.size());
}

TEST(Schedule, ReadsTensorsInTheOrderOfTheFiles) {
  CopyPlan plan;
  plan.tensors = {whole("c", {4}, 0, 1), whole("b", {4}, 100), whole("a", {4}, 10)};
  const auto schedule = make_schedule(plan, true);
  std::string order;
  for (const auto& segment : schedule.segments) order += plan.tensors[segment.index].tensor.name;
  EXPECT_EQ(order, "abc");
  EXPECT_EQ(schedule.tasks.size(), 1U) << "small tensors share a task";
  expect_tasks_hold_all_segments(schedule);
}

TEST(Schedule, CutsLargeTensorsAndGathersSmallOnes) {
  CopyPlan plan;
  plan.tensors = {whole("small", {3}, 0), whole("large", {2 * kTaskElements + 5}, 6),
                  whole("last", {3}, 6 + 4 * kTaskElements + 10)};
  const auto schedule = make_schedule(plan, false);
  expect_tasks_hold_all_segments(schedule);
  std::map<std::uint32_t, std::int64_t> seen;
  for (const auto& segment : schedule.segments) {
    EXPECT_EQ(segment.begin, seen[segment.index]) << "segments of a tensor follow each other";
    seen[segment.index] = segment.end;
  }
  for (std::uint32_t i = 0; i < plan.tensors.size(); ++i)
    EXPECT_EQ(seen[i], plan.tensors[i].tensor.num_bytes());
}

TEST(Schedule, FillsPaddingOnlyWhereItWrites) {
  CopyPlan plan;
  plan.tensors = {whole("w", {3}, 0)};
  plan.discards = {{.tensor = "in", .box = Box::whole({4})}};
  plan.fills = {{.tensor = "out", .box = Box::whole({kTaskElements + 1})}};
  const auto count = [](const Schedule& schedule, Segment::Kind kind) {
    return std::ranges::count(schedule.segments, kind, &Segment::kind);
  };
  const auto reads = make_schedule(plan, false);
  EXPECT_EQ(count(reads, Segment::Kind::kDiscard), 1);
  EXPECT_EQ(count(reads, Segment::Kind::kFill), 0);
  const auto writes = make_schedule(plan, true);
  EXPECT_EQ(count(writes, Segment::Kind::kFill), 2) << "elements, cut as tensors are";
  expect_tasks_hold_all_segments(writes);
}

TEST(TargetSchedule, ReadsOnlyWhatAPieceWantsInTheOrderOfTheSource) {
  CopyPlan plan;
  plan.tensors = {whole("b", {8}, 100), whole("a", {8}, 0)};
  for (auto& planned : plan.tensors) {
    for (const std::int64_t from : {4, 0})
      planned.targets.push_back({{.box = {.offset = {from}, .size = {2}}, .at = {.strides = {2}}}});
  }
  const auto schedule = make_target_schedule(plan);
  std::string order;
  for (const auto& segment : schedule.segments) {
    const auto& planned = plan.tensors[segment.index];
    order += planned.tensor.name + to_string(planned.targets[segment.cover][segment.piece].box);
    EXPECT_EQ(std::tuple(segment.begin, segment.end), std::tuple(0, 2));
  }
  EXPECT_EQ(order, "a[0:2]a[4:6]b[0:2]b[4:6]");
}

TEST(TargetSchedule, CutsPiecesAtRowsWhereTheyFit) {
  const std::int64_t columns = kTaskElements / 3;  // three rows, and something over
  CopyPlan plan;
  plan.tensors = {whole("w", {7, columns}, 0)};
  plan.tensors[0].source[0].at.strides = {2 * columns, 2};
  plan.tensors[0].targets = {
      {{.box = Box::whole({7, columns}), .at = {.strides = {2 * columns, 2}}}}};
  const auto schedule = make_target_schedule(plan);
  expect_tasks_hold_all_segments(schedule);
  ASSERT_EQ(schedule.segments.size(), 3U);
  EXPECT_EQ(schedule.segments[0].end, 3 * columns);
  EXPECT_EQ(schedule.segments[2].begin, 6 * columns);
  EXPECT_EQ(schedule.segments[2].end, 7 * columns);
}

TEST(BufferSizes, MakeRoomForWiderElementsAndForReplicas) {
  CopyPlan plan;
  plan.tensors = {whole("w", {8}, 0)};
  EXPECT_EQ(buffer_sizes(plan).scratch, kTaskBytes);
  EXPECT_EQ(buffer_sizes(plan).replica, 0);
  plan.tensors[0].targets = {{{.box = Box::whole({8}), .dtype = DType::kF32}}};
  plan.tensors[0].replicas = {plan.tensors[0].source};
  EXPECT_EQ(buffer_sizes(plan).scratch, 2 * kTaskBytes);
  EXPECT_EQ(buffer_sizes(plan).replica, kTaskBytes);
}

}  // namespace schedule_test
}  // namespace ferry::distckpt
