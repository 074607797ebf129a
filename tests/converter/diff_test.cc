#include "converter/diff.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "converter/convert.h"
#include "converter/verify.h"
#include "distckpt/elements/cast.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/naive_cast.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace diff_test {

using distckpt::DType;
using support::TempDir;

constexpr std::string_view kUp = "model.layers.1.mlp.up_proj.weight";

// A tensor's elements in a folder of one file: read, changed, written.
class Elements {
 public:
  Elements(const std::filesystem::path& folder, std::string_view name)
      : path_(folder / "model.safetensors"), bytes_(support::read_bytes(path_)) {
    const auto header = distckpt::read_safetensors_header(path_);
    for (const auto& entry : header.entries) {
      if (entry.name != name) continue;
      dtype_ = entry.dtype;
      begin_ = static_cast<std::size_t>(entry.begin);
      count_ = entry.shape.product();
    }
  }

  std::int64_t count() const { return count_; }
  double get(std::int64_t index) { return support::naive_value(dtype_, at(index)); }
  void set(std::int64_t index, double value) { support::naive_round(value, dtype_, at(index)); }
  void save() { support::write_bytes(path_, bytes_); }

 private:
  std::byte* at(std::int64_t index) {
    return &bytes_[begin_ + static_cast<std::size_t>(index * size_of(dtype_))];
  }

  std::filesystem::path path_;
  std::vector<std::byte> bytes_;
  DType dtype_ = DType::kBF16;
  std::size_t begin_ = 0;
  std::int64_t count_ = 0;
};

const TensorDiff& find(const DiffReport& report, std::string_view name) {
  for (const auto& tensor : report.tensors) {
    if (tensor.name == name) return tensor;
  }
  throw std::runtime_error("no such tensor");
}

class Diff : public testing::Test {
 protected:
  void SetUp() override {
    support::write_tiny_model({}, dir_ / "a", 1);
    convert({.from = dir_ / "a", .to = dir_ / "b", .format = Format::kHuggingFace});
  }
  TempDir dir_;
};

TEST_F(Diff, OfEqualCheckpointsSaysSo) {
  const auto report = diff({.left = dir_ / "a", .right = dir_ / "b"});
  EXPECT_TRUE(report.identical());
  EXPECT_EQ(report.total.relative_difference(), 0);
  EXPECT_GT(report.total.left_norm(), 0);
  EXPECT_EQ(report.total.left_norm(), report.total.right_norm());
}

TEST_F(Diff, GivesNormsAndCountsOfTheTensorThatChanged) {
  Elements up(dir_ / "b", kUp);
  double left = 0;
  double right = 0;
  double difference = 0;
  double largest = 0;
  std::int64_t changed = 0;
  for (std::int64_t i = 0; i < up.count(); ++i) {
    const auto before = up.get(i);
    if (i % 3 == 0) up.set(i, before * 1.5 + 0.25);
    const auto after = up.get(i);
    left += before * before;
    right += after * after;
    difference += (before - after) * (before - after);
    largest = std::max(largest, std::fabs(before - after));
    changed += before != after ? 1 : 0;
  }
  up.save();
  const auto report = diff({.left = dir_ / "a", .right = dir_ / "b"});
  EXPECT_FALSE(report.identical());
  EXPECT_EQ(report.num_changed, 1);
  const auto& found = find(report, kUp).difference;
  EXPECT_EQ(found.counts.different, changed);
  EXPECT_EQ(found.counts.elements, up.count());
  EXPECT_EQ(found.counts.max_difference, largest);
  EXPECT_NEAR(found.left_norm(), std::sqrt(left), 1e-9);
  EXPECT_NEAR(found.right_norm(), std::sqrt(right), 1e-9);
  EXPECT_NEAR(found.difference_norm(), std::sqrt(difference), 1e-9);
  EXPECT_NEAR(found.relative_difference(), std::sqrt(difference / left), 1e-9);
  EXPECT_EQ(report.total.counts.different, changed);
  EXPECT_EQ(find(report, "model.norm.weight").difference.counts.different, 0);
}

TEST_F(Diff, IsTheSameInAnyFormatLayoutAndNumberOfThreads) {
  Elements up(dir_ / "b", kUp);
  for (std::int64_t i = 0; i < up.count(); i += 2) up.set(i, up.get(i) + 0.125);
  up.save();
  convert({.from = dir_ / "b",
           .to = dir_ / "megatron",
           .parallel = {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}});
  const auto expected = diff({.left = dir_ / "a", .right = dir_ / "b", .threads = 1});
  for (const int threads : {1, 2, 5}) {
    const auto found = diff({.left = dir_ / "a", .right = dir_ / "megatron", .threads = threads});
    ASSERT_EQ(found.tensors.size(), expected.tensors.size());
    for (const auto& tensor : expected.tensors) {
      const auto& other = find(found, tensor.name).difference;
      EXPECT_EQ(other.squares.left, tensor.difference.squares.left) << tensor.name;
      EXPECT_EQ(other.squares.right, tensor.difference.squares.right) << tensor.name;
      EXPECT_EQ(other.squares.difference, tensor.difference.squares.difference) << tensor.name;
      EXPECT_EQ(other.counts.ulps, tensor.difference.counts.ulps) << tensor.name;
    }
  }
}

// Longer than an executor's task and a block of sums: the digits are the same at any threads.
TEST(DiffOfALargeTensor, HasTheSameDigitsAtAnyNumberOfThreads) {
  const TempDir dir;
  support::write_tiny_model({.hidden = 64, .vocab = 50'000}, dir / "a", 2);
  support::write_tiny_model({.hidden = 64, .vocab = 50'000}, dir / "b", 3);
  const auto expected = diff({.left = dir / "a", .right = dir / "b", .threads = 1}).total;
  ASSERT_GT(expected.counts.elements * 2, 3 * distckpt::kDigestBlock);
  for (const int threads : {2, 3, 8}) {
    const auto found = diff({.left = dir / "a", .right = dir / "b", .threads = threads}).total;
    EXPECT_EQ(found.squares.left, expected.squares.left);
    EXPECT_EQ(found.squares.right, expected.squares.right);
    EXPECT_EQ(found.squares.difference, expected.squares.difference);
  }
}

TEST_F(Diff, OfAPartLooksAtThatPartOnly) {
  Elements up(dir_ / "b", kUp);
  up.set(3, 100);
  up.save();
  const PairOptions both{.left = dir_ / "a", .right = dir_ / "b"};
  auto part = both;
  part.selection = {.include = {"model.layers.*"}, .exclude = {"*.up_proj.*"}};
  const auto report = diff(part);
  EXPECT_TRUE(report.identical());
  for (const auto& tensor : report.tensors) {
    EXPECT_TRUE(tensor.name.starts_with("model.layers.")) << tensor.name;
    EXPECT_FALSE(tensor.name.ends_with("up_proj.weight")) << tensor.name;
  }
  EXPECT_TRUE(verify(part).identical());
  part.selection = {.include = {std::string(kUp)}};
  EXPECT_FALSE(verify(part).identical());
  part.selection = {.include = {"*.upproj.*"}};
  EXPECT_TRUE(
      support::fails(ErrorKind::kUsage, {"*.upproj.*", "matches no tensor"}, [&] { diff(part); }));
}

TEST_F(Diff, NamesTensorsThatCannotBeCompared) {
  support::write_tiny_model({.num_layers = 3, .vocab = 60}, dir_ / "larger", 1);
  const auto report = diff({.left = dir_ / "a", .right = dir_ / "larger"});
  EXPECT_FALSE(report.identical());
  std::size_t only_right = 0;
  std::size_t shapes = 0;
  for (const auto& tensor : report.unpaired) {
    if (tensor.kind == UnpairedTensor::Kind::kOnlyRight) ++only_right;
    if (tensor.kind == UnpairedTensor::Kind::kShape) ++shapes;
  }
  EXPECT_EQ(shapes, 2U);  // embedding and output layer
  EXPECT_EQ(only_right, 9U);
  const auto table = tabulate(report);
  ASSERT_EQ(table.layers.size(), 3U);
  EXPECT_EQ(table.layers[2].num_tensors, 0);
  EXPECT_EQ(table.layers[2].cells.size(), 9U);
}

TEST(DiffTable, PutsATensorWhereItsNameSays) {
  const auto dense = place_of("model.layers.12.self_attn.q_proj.weight");
  EXPECT_EQ(dense.layer, 12);
  EXPECT_FALSE(dense.expert);
  EXPECT_EQ(dense.column, "self_attn.q_proj");
  const auto bias = place_of("model.layers.0.self_attn.q_proj.bias");
  EXPECT_EQ(bias.column, "self_attn.q_proj.bias");
  const auto expert = place_of("model.layers.3.mlp.experts.17.up_proj.weight");
  EXPECT_EQ(expert.layer, 3);
  EXPECT_EQ(expert.expert, 17);
  EXPECT_EQ(expert.column, "mlp.experts.*.up_proj");
  EXPECT_EQ(expert.name, "model.layers.3.mlp.experts.*.up_proj.weight");
  EXPECT_EQ(place_of("model.layers.3.mlp.shared_experts.up_proj.weight").column,
            "mlp.shared_experts.up_proj");
  const auto outside = place_of("lm_head.weight");
  EXPECT_FALSE(outside.layer);
  EXPECT_EQ(outside.column, "lm_head");
}

// Sizes and differences that are easy to add: expert e of layer l differs in e elements of ten.
TEST(DiffTable, MakesOneCellOfALayersExpertsAndNamesTheWorst) {
  DiffReport report;
  for (int layer = 0; layer < 2; ++layer) {
    for (int expert = 0; expert < 8; ++expert) {
      TensorDiff tensor{
          .name = fmt::format("model.layers.{}.mlp.experts.{}.up_proj.weight", layer, expert)};
      const auto changed = layer == 0 ? 0 : expert == 5 ? 9 : expert;
      tensor.difference.counts = {.elements = 10, .different = changed};
      tensor.difference.squares = {.left = 4, .right = 4, .difference = changed * 1.0};
      report.tensors.push_back(tensor);
    }
  }
  report.tensors.push_back({.name = "model.norm.weight"});
  const auto table = tabulate(report);
  EXPECT_EQ(table.columns, std::vector<std::string>{"mlp.experts.*.up_proj"});
  ASSERT_EQ(table.layers.size(), 2U);
  ASSERT_EQ(table.layers[1].cells.size(), 1U);
  const auto& cell = table.layers[1].cells[0];
  EXPECT_EQ(cell.num_tensors, 8);
  EXPECT_EQ(cell.num_changed, 7);
  EXPECT_EQ(cell.worst_expert, 5);
  EXPECT_EQ(cell.difference.counts.elements, 80);
  EXPECT_EQ(cell.difference.counts.different, 0 + 1 + 2 + 3 + 4 + 9 + 6 + 7);
  EXPECT_EQ(cell.difference.squares.difference, 32);
  EXPECT_EQ(table.layers[0].num_changed, 0);
  ASSERT_EQ(table.outside.cells.size(), 1U);
  EXPECT_EQ(table.outside.cells[0].column, "model.norm");
}

}  // namespace diff_test
}  // namespace ferry::converter
