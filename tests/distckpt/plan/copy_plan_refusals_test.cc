// Refusals of the planner: elements that are lost or there twice, dtypes and scales that do not
// fit.
#include <gtest/gtest.h>

#include <vector>

#include "tests/distckpt/plan/copy_plan_side.h"
#include "tests/support/expect.h"

namespace ferry::distckpt {
namespace copy_plan_refusals_test {

using copy_plan_test::box;
using copy_plan_test::fc1_at_tp4;
using copy_plan_test::gate_and_up;
using copy_plan_test::gate_and_up_files;
using copy_plan_test::kFfn;
using copy_plan_test::kHidden;
using copy_plan_test::Side;
using support::fails;

TEST(CopyPlanRefusals, RefusesWhatIsNotCoveredExactlyOnce) {
  const auto source = gate_and_up_files();
  const auto plan = [&](const Side& target) {
    return [&] { plan_copy(gate_and_up(), source.side(), target.side()); };
  };
  auto lost = fc1_at_tp4();
  lost.map.links.pop_back();  // up is never written
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"linear_fc1", "[8:16, 0:4]", "written 0 times"}, plan(lost)));

  auto twice = fc1_at_tp4();
  twice.map.links.push_back(twice.map.links.back());
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"linear_fc1", "written 2 times"}, plan(twice)));

  auto surplus = fc1_at_tp4();
  surplus.add_whole("linear_fc3", {1, 1});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"linear_fc3", "written 0 times"}, plan(surplus)));

  auto overlap = fc1_at_tp4();
  overlap.layout.tensor(0).shards[3].box.offset[0] -= 1;
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"linear_fc1", "stored"}, plan(overlap)));

  auto outside = fc1_at_tp4();
  outside.map.links[1].stored_box.offset[0] += 1;
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"linear_fc1", "leaves its shape"}, plan(outside)));

  auto bent = fc1_at_tp4();
  bent.map.links[0].stored_box = box({0, 0}, {2 * kFfn, 2});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"linear_fc1", "cannot be gate"}, plan(bent)));
}

TEST(CopyPlanRefusals, RefusesDTypesThatCannotBeCast) {
  const std::vector<ModelTensor> tensors{{.name = "w", .shape = {4, 2}}};
  for (const auto dtype : {DType::kF8E4M3, DType::kI32}) {
    Side source;
    source.link_whole(0, source.add_whole("stored", {4, 2}, dtype));
    EXPECT_TRUE(fails(ErrorKind::kLayout, {"stored", short_name(dtype), "bf16", "w"},
                      [&] { plan_read(tensors, source.side()); }));
  }
}

TEST(CopyPlanRefusals, RefusesScalesThatDoNotFit) {
  const std::vector<ModelTensor> tensors{{.name = "w", .dtype = DType::kBF16, .shape = {300, 200}}};
  const auto quantised = [](Shape scales) {
    Side side;
    side.link_whole(0, side.add_whole("w", {300, 200}, DType::kF8E4M3));
    side.map.links.back().scale = 0;
    const auto scale = side.add_whole("w_scale_inv", scales, DType::kF32);
    side.map.scales.push_back({.stored = scale, .block = {128, 128}});
    return side;
  };
  const auto plan = [&](const Side& source) { return [&] { plan_read(tensors, source.side()); }; };
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w_scale_inv", "[2, 2]", "expected [3, 2]"},
                    plan(quantised({2, 2}))));
  auto flat = quantised({3, 2});
  flat.map.scales[0].block = {128};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "[128]"}, plan(flat)));
  auto unused = quantised({3, 2});
  unused.map.scales.push_back(
      {.stored = unused.add_whole("x_scale_inv", {1, 1}, DType::kF32), .block = {128, 128}});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"x_scale_inv", "0 tensors"}, plan(unused)));
  auto forgotten = quantised({3, 2});
  forgotten.add_whole("y_scale_inv", {1, 1}, DType::kF32);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"y_scale_inv", "read 0 times"}, plan(forgotten)));
}

// The same on the source's side: what is missing of the model, or there twice.
TEST(CopyPlanRefusals, RefusesAModelThatIsNotFoundExactlyOnce) {
  const auto plan = [&](const Side& source) {
    return [&] { plan_read(gate_and_up(), source.side()); };
  };
  const auto whole = Box::whole({kFfn, kHidden});
  Side lost;
  lost.link(0, whole, lost.add_whole("gate", {kFfn, kHidden}), whole);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"up", "no part of it is read"}, plan(lost)));

  auto part = lost;
  part.link(1, box({0, 0}, {5, kHidden}), part.add_whole("up_part", {5, kHidden}),
            box({0, 0}, {5, kHidden}));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"up: elements [5:8, 0:4]", "read 0 times"}, plan(part)));

  auto twice = gate_and_up_files();
  twice.link(1, box({2, 0}, {3, kHidden}), twice.add_whole("up_again", {3, kHidden}),
             box({0, 0}, {3, kHidden}));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"up: elements [2:5, 0:4]", "read 2 times"}, plan(twice)));

  auto copy_in_part = gate_and_up_files();
  copy_in_part.link(1, box({0, 0}, {5, kHidden}), copy_in_part.add_whole("tied", {5, kHidden}),
                    box({0, 0}, {5, kHidden}), 1);
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"up: elements [5:8, 0:4]", "read 0 times"}, plan(copy_in_part)));

  auto no_first = lost;
  no_first.link(1, whole, no_first.add_whole("tied", {kFfn, kHidden}), whole, 1);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"up", "read 0 times"}, plan(no_first)));

  auto beyond = gate_and_up_files();
  beyond.map.links[1].model_box.offset[0] = 1;
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"up: [1:9, 0:4] leaves its shape [8, 4]"}, plan(beyond)));

  auto padded = gate_and_up_files();
  padded.map.padding.push_back({.stored = 1, .box = box({7, 0}, {1, kHidden})});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"up: elements [7:8, 0:4]", "read 2 times"}, plan(padded)));

  auto padding_beyond = gate_and_up_files();
  padding_beyond.map.padding.push_back({.stored = 1, .box = box({8, 0}, {1, kHidden})});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"up", "[8:9, 0:4]"}, plan(padding_beyond)));
}

TEST(CopyPlanRefusals, RefusesShardsThatDoNotTileTheirTensor) {
  const auto plan = [&](const Side& source) {
    return [&] { plan_read(gate_and_up(), source.side()); };
  };
  auto overlap = fc1_at_tp4();
  overlap.layout.tensor(0).shards[3].box.offset[0] -= 1;  // rows 10:12, now 9:11
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"linear_fc1: elements [9:10, 0:4]", "stored 2 times"},
                    plan(overlap)));
  auto lost = fc1_at_tp4();
  lost.layout.tensor(0).shards.pop_back();
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"linear_fc1: elements [14:16, 0:4]", "stored 0 times"},
                    plan(lost)));
  auto beyond = fc1_at_tp4();
  beyond.layout.tensor(0).shards[7].box.offset[0] += 1;
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"linear_fc1", "[15:17, 0:4]"}, plan(beyond)));
}

TEST(CopyPlanRefusals, RefusesAFlatLinkOfAnotherNumberOfElements) {
  const std::vector<ModelTensor> tensors{{.name = "w", .shape = {4, 6}}};
  for (const auto& stored : {Shape{23}, Shape{25}, Shape{4, 6}, Shape{24, 1}}) {
    Side source;
    source.link(0, box({0, 0}, {4, 6}), source.add_whole("bucket", stored), Box::whole(stored), 0,
                true);
    EXPECT_TRUE(fails(ErrorKind::kLayout, {"bucket", "w [0:4, 0:6]"}, [&] {
      plan_read(tensors, source.side());
    })) << to_string(stored);
  }
}

TEST(CopyPlanRefusals, SaysWhichSideIsWrong) {
  const auto good = gate_and_up_files();
  auto bad = gate_and_up_files();
  bad.map.links.pop_back();
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"while planning the source", "read"},
                    [&] { plan_copy(gate_and_up(), bad.side(), good.side()); }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"while planning the target", "written"},
                    [&] { plan_copy(gate_and_up(), good.side(), bad.side()); }));
}

TEST(Layout, RefusesATensorThatIsThereTwiceOrOverflows) {
  Layout layout;
  layout.add_tensor({.name = "w", .shape = {2, 3}});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "twice"},
                    [&] { layout.add_tensor({.name = "w", .shape = {1}}); }));
  const auto big = std::int64_t{1} << 32;
  for (const auto& shape : {Shape{big, big}, Shape{-1, 3}, Shape{big, big / 4, 1}}) {
    EXPECT_TRUE(fails(ErrorKind::kLayout, {"x", "overflows"}, [&] {
      layout.add_tensor({.name = "x", .dtype = DType::kF64, .shape = shape});
    }));
  }
  EXPECT_EQ(layout.find("w"), 0U);
  EXPECT_EQ(layout.find("x"), std::nullopt);
  EXPECT_EQ(layout.num_bytes(), 12);
}

// ---- a model of 91,991 tensors ----

}  // namespace copy_plan_refusals_test
}  // namespace ferry::distckpt
