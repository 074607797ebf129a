#include "distckpt/formats/torch_save/dtensor.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/formats/torch_save/pickle_writer.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace dtensor_test {

using support::fails;

struct Placed {
  std::string placement = "Shard";
  std::int64_t dim = 0;
};

// A file that holds {"w": a DTensor} as torch 2.11 pickles it. The local tensor holds bytes.
class Saved {
 public:
  Saved(const Shape& shape,
        const Shape& local,
        const Dims& mesh,
        const Dims& at,
        const std::vector<Placed>& placements)
      : path_(dir_.path() / "rank.pt") {
    PickleWriter pickle;
    pickle.begin_dict().string("w");
    pickle.begin_call("torch._tensor._rebuild_from_type_v2");
    pickle.global("torch._utils._rebuild_wrapper_subclass");
    pickle.global("torch.distributed.tensor.DTensor");
    pickle.begin_tuple().global("torch.distributed.tensor.DTensor").global("torch.uint8");
    pickle.integers(shape).end_tuple();
    pickle.begin_tuple().none().begin_dict();
    pickle.string("_local_tensor").begin_call("torch._utils._rebuild_tensor_v2");
    pickle.begin_persistent_id().string("storage").global("torch.ByteStorage").string("0");
    pickle.string("cpu").integer(local.product()).end_persistent_id();
    pickle.integer(0).integers(local).integers(row_major_strides(local)).boolean(false);
    pickle.begin_dict().end_dict().end_call();
    pickle.string("_spec").begin_object("torch.distributed.tensor._dtensor_spec.DTensorSpec");
    pickle.string("mesh").begin_object("torch.distributed.device_mesh.DeviceMesh");
    pickle.string("_layout").begin_object("torch.distributed._mesh_layout._MeshLayout");
    pickle.string("shape").integers(mesh).end_object();
    pickle.string("_coordinate_on_dim").integers(at).end_object();
    pickle.string("placements").begin_tuple();
    for (const auto& placed : placements) {
      pickle.begin_object("torch.distributed.tensor.placement_types." + placed.placement);
      pickle.string("dim").integer(placed.dim).end_object();
    }
    pickle.end_tuple().end_object().end_dict().end_tuple().end_call().end_dict();
    const std::string bytes(static_cast<std::size_t>(local.product()), '\7');
    const TorchStorage storage{.key = "0", .bytes = bytes};
    write_text(path_, torch_archive(pickle.finish(), "rank", std::span(&storage, 1)));
  }

  RankTensorParts parse() const {
    const TorchFile file(path_, dtensor_globals(), "d");
    return parse_rank_parts(file, file.root().at("w"), "w");
  }

 private:
  support::TempDir dir_;
  std::filesystem::path path_;
};

TEST(DTensor, RowsAreDividedAsTorchChunkDoes) {
  // 10 rows over 4 ranks: 3, 3, 3, 1. 5 rows over 4: 2, 2, 1, none.
  const std::vector<std::vector<std::int64_t>> rows{{3, 3, 3, 1}, {2, 2, 1, 0}, {1, 0, 0, 0}};
  const std::vector<std::int64_t> totals{10, 5, 1};
  for (std::size_t i = 0; i < totals.size(); ++i) {
    std::int64_t offset = 0;
    for (std::int64_t rank = 0; rank < 4; ++rank) {
      const auto count = rows[i][static_cast<std::size_t>(rank)];
      const auto parsed = Saved({totals[i], 2}, {count, 2}, {4}, {rank}, {{}}).parse();
      EXPECT_EQ(parsed.shape, (Shape{totals[i], 2}));
      EXPECT_EQ(parsed.copy, 0);
      ASSERT_EQ(parsed.parts.size(), count > 0 ? 1U : 0U);
      if (count > 0) {
        EXPECT_EQ(parsed.parts[0].box, (Box{.offset = {offset, 0}, .size = {count, 2}}));
      }
      offset += count;
    }
  }
}

TEST(DTensor, ReplicasAreNumberedAndTwoShardsCutOneAfterTheOther) {
  const auto replica =
      Saved({8}, {4}, {2, 2}, {1, 1}, {{.placement = "Replicate"}, {.placement = "Shard"}}).parse();
  EXPECT_EQ(replica.copy, 1);
  EXPECT_EQ(replica.parts.at(0).box, (Box{.offset = {4}, .size = {4}}));
  const auto twice = Saved({8, 6}, {2, 6}, {2, 2}, {1, 1}, {{}, {}}).parse();
  EXPECT_EQ(twice.parts.at(0).box, (Box{.offset = {6, 0}, .size = {2, 6}}));
  const auto grid = Saved({8, 6}, {4, 3}, {2, 2}, {0, 1}, {{}, {.dim = 1}}).parse();
  EXPECT_EQ(grid.parts.at(0).box, (Box{.offset = {0, 3}, .size = {4, 3}}));
}

TEST(DTensor, RefusesWhatContradictsItself) {
  const auto refuses = [](const std::vector<std::string_view>& words, const Saved& saved,
                          ErrorKind kind = ErrorKind::kCorrupt) {
    EXPECT_TRUE(fails(kind, words, [&] { saved.parse(); }));
  };
  refuses({"rank.pt", "w", "[3]", "[0:4]"}, Saved({8}, {3}, {2}, {0}, {{}}));
  refuses({"place"}, Saved({8}, {4}, {2}, {2}, {{}}));
  refuses({"place"}, Saved({8}, {4}, {2}, {-1}, {{}}));
  refuses({"placements"}, Saved({8}, {4}, {2}, {0}, {{}, {}}));
  refuses({"dimension 1"}, Saved({8}, {4}, {2}, {0}, {{.dim = 1}}));
  refuses({"dimension -1"}, Saved({8}, {4}, {2}, {0}, {{.dim = -1}}));
  refuses({"Partial"}, Saved({8}, {8}, {2}, {0}, {{.placement = "Partial"}}), ErrorKind::kLayout);
}

}  // namespace dtensor_test
}  // namespace ferry::distckpt
