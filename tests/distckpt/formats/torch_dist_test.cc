#include "distckpt/formats/torch_dist.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"
#include "distckpt/execute/executor.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/formats/torch_dist_writer.h"
#include "distckpt/formats/torch_save/pickle_writer.h"
#include "distckpt/formats/torch_save/torch_zip.h"
#include "distckpt/plan/copy_plan.h"
#include "distckpt/storage/filenames.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/memory_box_io.h"
#include "tests/support/random_boxes.h"
#include "tests/support/sha256.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace torch_dist_test {

namespace fs = std::filesystem;
using support::fails;
using support::Random;
using support::same_bytes;
using support::TempDir;
using support::test_data;

// Every tensor whole, row-major, by way of the planner and the executor.
std::vector<std::vector<std::byte>> read_all(const TorchDistLayout& resolved, FileSource& source) {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<ModelTensor> tensors;
  Layout memory;
  TensorMap map;
  for (const auto& tensor : resolved.layout.tensors()) {
    const auto index = static_cast<std::uint32_t>(tensors.size());
    const auto whole = Box::whole(tensor.shape);
    tensors.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
    map.links.push_back({.model = index, .model_box = whole, .stored = index, .stored_box = whole});
    bytes.emplace_back(static_cast<std::size_t>(tensor.num_bytes()));
    const auto storage = memory.add_storage(
        MemoryStorage{.data = bytes.back().data(), .size = std::ssize(bytes.back())});
    memory.add_tensor({.name = tensor.name,
                       .dtype = tensor.dtype,
                       .shape = tensor.shape,
                       .shards = {packed_shard(whole, tensor.dtype, storage, 0)}});
  }
  const auto plan = plan_copy(tensors, {.layout = &resolved.layout, .map = &map},
                              {.layout = &memory, .map = &map});
  support::MemorySink sink(memory);
  Executor({.threads = 2}).submit(plan, source, &sink).wait();
  return bytes;
}

std::vector<const TorchDistTensor*> all_tensors(const TorchDistCheckpoint& checkpoint) {
  std::vector<const TorchDistTensor*> all;
  for (const auto& tensor : checkpoint.tensors) all.push_back(&tensor);
  return all;
}

// --- What Megatron-Core wrote ---

class TorchDistFixture : public testing::TestWithParam<const char*> {
 protected:
  TorchDistFixture() {
    auto folder = test_data(GetParam());
    stated = nlohmann::json::parse(read_text(folder / "sha256.json"));
    if (fs::exists(folder / "iter_0000010")) folder /= "iter_0000010";
    checkpoint = read_torch_dist(folder);
  }

  nlohmann::json stated;
  TorchDistCheckpoint checkpoint;
};

TEST_P(TorchDistFixture, HoldsTheTensorsThatItsWriterStated) {
  std::vector<const TorchDistTensor*> model;
  for (const auto* tensor : all_tensors(checkpoint)) {
    if (!tensor->key.starts_with("optimizer.")) model.push_back(tensor);
  }
  const auto& expected = stated.at("megatron");
  ASSERT_EQ(model.size(), expected.size());
  const auto resolved = resolve_layout(checkpoint, model);
  EXPECT_NO_THROW(check_layout(resolved.layout));
  FileSource source(resolved.layout.storages(), resolved.checksums);
  const auto bytes = read_all(resolved, source);
  for (std::size_t i = 0; i < model.size(); ++i) {
    ASSERT_TRUE(expected.contains(model[i]->key)) << model[i]->key;
    const auto& one = expected.at(model[i]->key);
    EXPECT_EQ(torch_name(model[i]->dtype), one.at("dtype").get<std::string>());
    EXPECT_EQ(to_string(model[i]->shape),
              fmt::format("[{}]", fmt::join(one.at("shape").get<std::vector<int>>(), ", ")));
    EXPECT_EQ(support::sha256(bytes[i]), one.at("sha256").get<std::string>()) << model[i]->key;
  }
  EXPECT_GT(resolved.checksums.size(), 0U);
  EXPECT_EQ(source.verify_checksums(), std::ssize(resolved.checksums));
}

// Optimizer state, too, is tensors whose bytes the archives' checksums prove.
TEST_P(TorchDistFixture, EveryChunkHasTheChecksumThatItsArchiveStates) {
  const auto all = all_tensors(checkpoint);
  const auto resolved = resolve_layout(checkpoint, all);
  FileSource source(resolved.layout.storages(), resolved.checksums);
  const auto bytes = read_all(resolved, source);
  EXPECT_EQ(source.verify_checksums(), std::ssize(resolved.checksums));
  const auto& expected = stated.at("optimizer_model_space");
  for (std::size_t i = 0; i < all.size(); ++i) {
    // The digests of flattened and reformulated state are those of other shapes.
    if (!expected.contains(all[i]->key)) continue;
    const auto& one = expected.at(all[i]->key);
    if (one.at("shape").get<std::vector<std::int64_t>>() !=
        std::vector(all[i]->shape.begin(), all[i]->shape.end())) {
      continue;
    }
    EXPECT_EQ(support::sha256(bytes[i]), one.at("sha256").get<std::string>()) << all[i]->key;
  }
}

TEST_P(TorchDistFixture, ObjectsAndCommonStateAreReadable) {
  EXPECT_NO_THROW(check_objects(checkpoint));
  EXPECT_TRUE(std::ranges::is_sorted(checkpoint.tensors, {}, &TorchDistTensor::key));
  EXPECT_TRUE(std::ranges::is_sorted(checkpoint.objects, {}, &TorchDistObject::key));
  const auto common = read_common_state(checkpoint);
  ASSERT_TRUE(common.has_value());
  EXPECT_EQ(common_dict(*common).kind(), PickleKind::kDict);
}

INSTANTIATE_TEST_SUITE_P(,
                         TorchDistFixture,
                         testing::Values("llama_tp1",
                                         "llama_tp2pp2",
                                         "llama_tp2pp2_local",
                                         "llama_tp2pp2_mc0131",
                                         "llama_tp2pp2_mc0161",
                                         "llama_singleton",
                                         "qwen2",
                                         "qwen2_tied_pp2",
                                         "qwen3",
                                         "llama_optim_full",
                                         "llama_optim_dp",
                                         "llama_optim_fsms"),
                         [](const auto& folder) { return std::string(folder.param); });

// --- What TorchDistTarget writes ---

// A tensor cut into random chunks, each the main replica of some rank, some replicated on others.
void add_random_tensor(Random& random, int number, std::vector<RankState>& ranks) {
  constexpr std::array kDTypes{DType::kBF16, DType::kF32, DType::kI64, DType::kU8, DType::kF8E4M3};
  const auto shape = support::random_shape(random, static_cast<int>(random.between(1, 4)), 1, 12);
  const auto dtype = kDTypes[static_cast<std::size_t>(random.between(0, 4))];
  const auto rank_of = [&]() -> RankState& {
    return ranks[static_cast<std::size_t>(random.between(0, std::ssize(ranks) - 1))];
  };
  for (const auto& box : support::random_tiling(random, shape, 6)) {
    ShardedTensor shard{.key = fmt::format("decoder.{}.weight", number),
                        .dtype = dtype,
                        .local_shape = box.size,
                        .global_shape = shape,
                        .global_offset = box.offset};
    while (shard.local_shape.rank() > 0 && shard.local_shape[0] == 1 && random.chance(30)) {
      shard.local_shape = shard.local_shape.drop_front(1);
      ++shard.prepend_axis_num;
    }
    shard.replica_id = {0, 0};
    rank_of().tensors.push_back(shard);
    if (random.chance(40)) {
      shard.replica_id = {0, 1};
      rank_of().tensors.push_back(shard);
    }
  }
}

TEST(TorchDistTarget, WritesWhatIsReadBack) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    const TempDir dir;
    Random random(seed);
    std::vector<RankState> ranks(static_cast<std::size_t>(random.between(1, 4)));
    for (int i = 0; i < 5; ++i) add_random_tensor(random, i, ranks);
    ranks.back().extra_states.push_back(
        {.key = "decoder._extra_state", .global_shape = {2, 4}, .global_offset = {1, 3}});
    const TorchDistTarget target(dir.path(), ranks, [](PickleWriter& pickle) {
      pickle.begin_dict().string("iteration").integer(10).end_dict();
    });

    // Random bytes in memory, copied into the target's layout by the executor.
    Layout memory;
    TensorMap map;
    std::vector<ModelTensor> tensors;
    std::vector<std::vector<std::byte>> bytes;
    for (const auto& tensor : target.layout().tensors()) {
      const auto index = static_cast<std::uint32_t>(tensors.size());
      const auto whole = Box::whole(tensor.shape);
      bytes.push_back(random.bytes(tensor.num_bytes()));
      const auto storage = memory.add_storage(
          MemoryStorage{.data = bytes.back().data(), .size = std::ssize(bytes.back())});
      memory.add_tensor({.name = tensor.name,
                         .dtype = tensor.dtype,
                         .shape = tensor.shape,
                         .shards = {packed_shard(whole, tensor.dtype, storage, 0)}});
      tensors.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
      map.links.push_back(
          {.model = index, .model_box = whole, .stored = index, .stored_box = whole});
    }
    const auto plan = plan_copy(tensors, {.layout = &memory, .map = &map},
                                {.layout = &target.layout(), .map = &map});
    support::MemorySource source(memory);
    FileSink sink(target.layout().storages(), target.protected_ranges(), WriteFile::Mode::kCreate);
    Executor({.threads = 3}).submit(plan, source, &sink).wait();
    target.finish_files(sink);
    target.finish_folder();

    EXPECT_TRUE(is_torch_dist(dir.path()));
    const auto found = read_torch_dist(dir.path());
    ASSERT_EQ(found.tensors.size(), bytes.size());
    ASSERT_EQ(found.objects.size(), 1U);
    EXPECT_EQ(found.objects[0].key, "decoder._extra_state/shard_1.3_2.4");
    EXPECT_NO_THROW(check_objects(found));
    EXPECT_EQ(common_dict(*read_common_state(found)).at("iteration").as_int(), 10);
    std::int64_t num_bytes = 0;
    for (const auto& file : found.files) num_bytes += file.size;
    EXPECT_EQ(target.num_bytes(), num_bytes);
    const auto resolved = resolve_layout(found, all_tensors(found));
    EXPECT_EQ(std::ssize(resolved.checksums), std::ssize(target.protected_ranges()));
    FileSource files(resolved.layout.storages(), resolved.checksums);
    const auto back = read_all(resolved, files);
    for (std::size_t i = 0; i < back.size(); ++i) {
      const auto index = target.layout().find(found.tensors[i].key);
      ASSERT_TRUE(index.has_value());
      ASSERT_TRUE(same_bytes(bytes[*index], back[i])) << found.tensors[i].key;
    }
    EXPECT_EQ(files.verify_checksums(), std::ssize(resolved.checksums));
  }
}

TEST(TorchDistTarget, RefusesToFinishWhatWasNotWrittenWhole) {
  const TempDir dir;
  const ShardedTensor shard{
      .key = "w", .local_shape = {2, 3}, .global_shape = {2, 3}, .global_offset = {0, 0}};
  const TorchDistTarget target(dir.path(), {{.tensors = {shard}}},
                               [](PickleWriter& pickle) { pickle.begin_dict().end_dict(); });
  FileSink sink(target.layout().storages(), target.protected_ranges(), WriteFile::Mode::kCreate);
  EXPECT_TRUE(fails(ErrorKind::kBug, {"w [0:2, 0:3]", "not written whole"},
                    [&] { target.finish_files(sink); }));
  EXPECT_FALSE(is_torch_dist(dir.path()));
}

TEST(TorchDistTarget, RefusesRanksThatDisagree) {
  const auto make = [](DType dtype, Shape global) {
    return RankState{.tensors = {{.key = "w",
                                  .dtype = dtype,
                                  .local_shape = {2, 3},
                                  .global_shape = global,
                                  .global_offset = {0, 0}}}};
  };
  const auto target = [](const std::vector<RankState>& ranks) {
    TorchDistTarget("folder", ranks, [](PickleWriter& pickle) { pickle.begin_dict().end_dict(); });
  };
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "fp32", "rank 1", "bf16"}, [&] {
    target({make(DType::kBF16, {4, 3}), make(DType::kF32, {4, 3})});
  }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "[4, 4]", "[4, 3]"}, [&] {
    target({make(DType::kBF16, {4, 3}), make(DType::kBF16, {4, 4})});
  }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "dimension 1"}, [&] {
    target({make(DType::kBF16, {4, 2})});
  }));
}

// --- What is refused ---

// A checkpoint of two tensors that a test can describe wrongly: w [4, 3] in two chunks of rows, and
// norm [3]; all in __0_0.distcp.
struct Description {
  struct Chunk {
    Dims offset{};
    Dims size{};
  };
  struct Tensor {
    std::string key{};
    Dims size{};
    std::vector<Chunk> chunks{};
    std::string dtype = "torch.float32";
  };
  struct Item {
    std::string key{};
    std::optional<Dims> at{};
    std::int64_t offset = 0;
    std::int64_t length = 0;
    std::string file = "__0_0.distcp";
  };
  std::vector<Tensor> tensors{};
  std::vector<Item> items{};
  std::string root = "torch.distributed.checkpoint.metadata.Metadata";
  std::string config = R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1})";
};

// Writes the data file and describes it rightly.
Description write_data(const fs::path& folder) {
  Description described{
      .tensors = {
          {.key = "w",
           .size = {4, 3},
           .chunks = {{.offset = {0, 0}, .size = {2, 3}}, {.offset = {2, 0}, .size = {2, 3}}}},
          {.key = "norm", .size = {3}, .chunks = {{.offset = {0}, .size = {3}}}}}};
  std::string file;
  for (const auto& tensor : described.tensors) {
    for (const auto& chunk : tensor.chunks) {
      const auto item = tensor_item_layout(DType::kF32, chunk.size);
      described.items.push_back({.key = tensor.key,
                                 .at = chunk.offset,
                                 .offset = std::ssize(file),
                                 .length = item.total_bytes()});
      const std::string payload(static_cast<std::size_t>(item.payload_bytes), '\7');
      file += item.head() + payload + item.tail(crc32(as_bytes(payload)));
    }
  }
  write_text(folder / "__0_0.distcp", file);
  return described;
}

void write_metadata(const fs::path& folder, const Description& described) {
  const std::string module = "torch.distributed.checkpoint.metadata.";
  PickleWriter pickle;
  pickle.begin_object(described.root).string("state_dict_metadata").begin_dict();
  for (const auto& tensor : described.tensors) {
    pickle.string(tensor.key).begin_object(module + "TensorStorageMetadata");
    pickle.string("properties").begin_object(module + "TensorProperties");
    pickle.string("dtype").global(tensor.dtype).end_object();
    pickle.string("size").size(tensor.size).string("chunks").begin_list();
    for (const auto& chunk : tensor.chunks) {
      pickle.begin_object(module + "ChunkStorageMetadata").string("offsets").size(chunk.offset);
      pickle.string("sizes").size(chunk.size).end_object();
    }
    pickle.end_list().end_object();
  }
  pickle.end_dict().string("storage_data").begin_dict();
  for (const auto& item : described.items) {
    pickle.begin_object(module + "MetadataIndex").string("fqn").string(item.key);
    if (item.at) pickle.string("offset").size(*item.at);
    pickle.end_object();
    pickle.begin_object("torch.distributed.checkpoint.filesystem._StorageInfo");
    pickle.string("relative_path").string(item.file).string("offset").integer(item.offset);
    pickle.string("length").integer(item.length).end_object();
  }
  pickle.end_dict().end_object();
  write_text(folder / kTorchDistMetadata, pickle.finish());
  write_text(folder / kTorchDistConfig, described.config);
}

// Reads all that can be read of a checkpoint that `change` has described wrongly.
void read_described(const std::function<void(Description&)>& change) {
  const TempDir dir;
  auto described = write_data(dir.path());
  change(described);
  write_metadata(dir.path(), described);
  const auto checkpoint = read_torch_dist(dir.path());
  const auto resolved = resolve_layout(checkpoint, all_tensors(checkpoint));
  FileSource source(resolved.layout.storages(), resolved.checksums);
  read_all(resolved, source);
  source.verify_checksums();
}

TEST(TorchDist, ReadsTheCheckpointThatTheFollowingTestsDamage) {
  EXPECT_NO_THROW(read_described([](Description&) {}));
}

struct Wrong {
  const char* name;
  std::function<void(Description&)> change;
  std::vector<std::string_view> fragments;
  ErrorKind kind = ErrorKind::kCorrupt;
};

class TorchDistDescribed : public testing::TestWithParam<Wrong> {};

TEST_P(TorchDistDescribed, WronglyIsRefusedNamingFileAndTensor) {
  const auto& wrong = GetParam();
  EXPECT_TRUE(fails(wrong.kind, wrong.fragments, [&] { read_described(wrong.change); }));
}

constexpr auto kMaxInt64 = std::numeric_limits<std::int64_t>::max();

INSTANTIATE_TEST_SUITE_P(
    ,
    TorchDistDescribed,
    testing::Values(
        Wrong{"chunk_missing",
              [](Description& it) {
                it.tensors[0].chunks.pop_back();
                it.items.erase(it.items.begin() + 1);
              },
              {".metadata", "w: elements [2:4, 0:3]", "stored 0 times"}},
        Wrong{"chunk_beyond_the_shape",
              [](Description& it) {
                it.tensors[0].size = {3, 3};
              },
              {".metadata", "w", "[2:4, 0:3]", "[3, 3]"}},
        Wrong{"chunk_of_another_rank",
              [](Description& it) {
                it.tensors[1].chunks[0].size = {1, 3};
              },
              {".metadata", "norm"}},
        Wrong{"chunk_twice",
              [](Description& it) { it.tensors[0].chunks.push_back(it.tensors[0].chunks[1]); },
              {".metadata", "w", "[2, 0]", "does not say where it lies"}},
        Wrong{"chunks_overlap",
              [](Description& it) {
                it.tensors[0].chunks[0].size = {3, 3};
              },
              {".metadata", "w: elements [2:3, 0:3]", "stored 2 times"}},
        Wrong{"chunk_of_another_size_than_its_archive",
              [](Description& it) {
                it.tensors[0].size = {4, 4};
                for (auto& chunk : it.tensors[0].chunks) chunk.size = {2, 4};
              },
              {"__0_0.distcp", "w", "[2, 3]", "[2, 4]"}},
        Wrong{"another_dtype_than_the_archive",
              [](Description& it) { it.tensors[1].dtype = "torch.bfloat16"; },
              {"__0_0.distcp", "norm", "float32", "bfloat16"}},
        Wrong{"unknown_dtype",
              [](Description& it) { it.tensors[1].dtype = "torch.Size"; },
              {".metadata", "norm", "torch.Size"}},
        Wrong{"key_twice",
              [](Description& it) { it.tensors.push_back(it.tensors[1]); },
              {".metadata", "norm", "twice"}},
        Wrong{"shape_overflows",
              [](Description& it) { it.tensors[1].size = {kMaxInt64}; },
              {".metadata", "norm", "overflows"}},
        Wrong{"item_missing",
              [](Description& it) { it.items.pop_back(); },
              {".metadata", "norm", "does not say where it lies"}},
        Wrong{"item_of_no_tensor",
              [](Description& it) { it.items.push_back({.key = "ghost", .at = Dims{0}}); },
              {".metadata", "1 items of no tensor", "ghost"}},
        Wrong{"item_twice",
              [](Description& it) { it.items.push_back(it.items[0]); },
              {".metadata", "w", "same item twice"}},
        Wrong{"items_overlap",
              [](Description& it) { it.items[1].offset -= 64; },
              {".metadata", "w", "__0_0.distcp"}},
        Wrong{"items_swapped",
              [](Description& it) {
                std::swap(it.items[1].offset, it.items[2].offset);
                std::swap(it.items[1].length, it.items[2].length);
              },
              {"__0_0.distcp", "[2, 3]", "[3] (norm)"}},
        Wrong{"item_beyond_the_end",
              [](Description& it) { it.items[2].length += 1; },
              {".metadata", "norm", "__0_0.distcp", "beyond its end"}},
        Wrong{"item_at_a_negative_offset",
              [](Description& it) { it.items[0].offset = -1; },
              {".metadata", "w"}},
        Wrong{"item_whose_end_overflows",
              [](Description& it) { it.items[2].length = kMaxInt64; },
              {".metadata", "norm", "beyond its end"}},
        Wrong{"item_too_short", [](Description& it) { it.items[2].length -= 8; }, {"__0_0.distcp"}},
        Wrong{"file_missing",
              [](Description& it) { it.items[2].file = "__1_0.distcp"; },
              {"__1_0.distcp", "No such file"},
              ErrorKind::kNotFound},
        Wrong{"file_above_the_folder",
              [](Description& it) { it.items[2].file = "../__0_0.distcp"; },
              {".metadata", "../__0_0.distcp"}},
        Wrong{"file_elsewhere",
              [](Description& it) { it.items[2].file = "/etc/passwd"; },
              {".metadata", "/etc/passwd"}},
        Wrong{"another_root",
              [](Description& it) {
                it.root = "torch.distributed.checkpoint.metadata.MetadataIndex";
              },
              {".metadata", "not the Metadata"}},
        Wrong{"a_class_of_someone_else",
              [](Description& it) { it.root = "subprocess.Popen"; },
              {".metadata", "subprocess.Popen"}},
        Wrong{"another_backend",
              [](Description& it) { it.config = R"({"sharded_backend": "zarr"})"; },
              {"metadata.json", "zarr", "torch_dist"},
              ErrorKind::kLayout},
        Wrong{"another_version",
              [](Description& it) {
                it.config = R"({"sharded_backend": "torch_dist", "sharded_backend_version": 2})";
              },
              {"metadata.json", "sharded_backend_version", "2"}},
        Wrong{"an_unknown_setting",
              [](Description& it) { it.config = R"({"sharded_backend": "torch_dist", "x": 1})"; },
              {"metadata.json", "\"x\""}}),
    [](const auto& wrong) { return wrong.param.name; });

TEST(TorchDist, RefusesAPickleThatNamesACommandAndRunsNothing) {
  const TempDir dir;
  write_metadata(dir.path(), write_data(dir.path()));
  PickleWriter pickle;
  pickle.begin_call("os.system").string("touch " + (dir / "run").string()).end_call();
  write_text(dir / ".metadata", pickle.finish());
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {".metadata", "os.system", "byte"},
                    [&] { read_torch_dist(dir.path()); }));
  EXPECT_FALSE(fs::exists(dir / "run"));
}

TEST(TorchDist, RefusesTheSameInTheCommonState) {
  const TempDir dir;
  write_metadata(dir.path(), write_data(dir.path()));
  PickleWriter pickle;
  pickle.begin_call("os.system").string("touch " + (dir / "run").string()).end_call();
  write_text(dir / "common.pt", torch_archive(pickle.finish(), "common"));
  const auto checkpoint = read_torch_dist(dir.path());
  EXPECT_TRUE(checkpoint.has_common_file);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"common.pt", "os.system"},
                    [&] { read_common_state(checkpoint); }));
  EXPECT_FALSE(fs::exists(dir / "run"));
}

TEST(TorchDist, SaysWhatIsMissing) {
  const TempDir dir;
  EXPECT_FALSE(is_torch_dist(dir.path()));
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"metadata.json"}, [&] { read_torch_dist(dir.path()); }));
  write_metadata(dir.path(), write_data(dir.path()));
  EXPECT_TRUE(is_torch_dist(dir.path()));
  EXPECT_FALSE(read_common_state(read_torch_dist(dir.path())).has_value());
  fs::remove(dir / ".metadata");
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {".metadata"}, [&] { read_torch_dist(dir.path()); }));
}

// The file was changed after its headers were read, and before its bytes are.
TEST(TorchDist, NoticesAFlippedBitByTheArchivesOwnChecksum) {
  const TempDir dir;
  fs::copy(test_data("llama_tp1") / "iter_0000010", dir / "copy", fs::copy_options::recursive);
  const auto checkpoint = read_torch_dist(dir / "copy");
  const auto& tensor = checkpoint.tensors.back();
  const auto resolved = resolve_layout(checkpoint, std::vector{&tensor});
  support::corrupt(dir / "copy/__0_0.distcp", resolved.layout.tensor(0).shards[0].at.offset + 5);
  FileSource source(resolved.layout.storages(), resolved.checksums);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"__0_0.distcp", tensor.key, "CRC-32"}, [&] {
    read_all(resolved, source);
    source.verify_checksums();
  }));
}

// Wherever the metadata is damaged, it is refused or describes what can be read.
TEST(TorchDist, SurvivesMutationsOfItsMetadata) {
  const TempDir dir;
  fs::copy(test_data("llama_tp1") / "iter_0000010", dir / "copy", fs::copy_options::recursive);
  const auto original = read_text(dir / "copy/.metadata");
  Random random(5);
  int refused = 0;
  for (int i = 0; i < 1500; ++i) {
    auto mutated = original;
    for (auto edits = random.between(1, 2); edits > 0; --edits) {
      const auto at = static_cast<std::size_t>(random.between(0, std::ssize(mutated) - 1));
      mutated[at] = static_cast<char>(random.bits());
    }
    if (random.chance(5)) mutated.resize(static_cast<std::size_t>(random.between(0, 500)));
    support::write_bytes(dir / "copy/.metadata", as_bytes(mutated));
    try {
      const auto checkpoint = read_torch_dist(dir / "copy");
      resolve_layout(checkpoint, all_tensors(checkpoint));
    } catch (const Error& error) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 500);
}

}  // namespace torch_dist_test
}  // namespace ferry::distckpt
