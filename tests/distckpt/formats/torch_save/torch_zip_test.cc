// torch.save archives: torch's own are read and written again byte for byte; damage is refused.
#include "distckpt/formats/torch_save/torch_zip.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <string>
#include <string_view>

#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"
#include "distckpt/formats/torch_save/pickle_writer.h"
#include "tests/distckpt/formats/torch_save/torch_zip_archives.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace torch_zip_test {

using namespace std::string_literals;

// Every item of every checkpoint in the test data, as torch wrote it.
TEST(TorchZip, WritesTheVeryBytesThatTorchWrites) {
  constexpr std::string_view kMetadataGlobals[] = {"torch.", "megatron.core.", "pathlib.PosixPath"};
  int tensors = 0;
  int extra_states = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(support::test_data(""))) {
    if (entry.path().filename() != ".metadata") continue;
    const Pickle metadata =
        Pickle::parse(read_text(entry.path()),
                      {.source = entry.path().string(), .allowed_globals = kMetadataGlobals});
    for (const auto& [index, info] : metadata.root().at("storage_data").items()) {
      const ReadFile file(entry.path().parent_path() / info.at("relative_path").as_string());
      const std::int64_t offset = info.at("offset").as_int();
      const std::int64_t length = info.at("length").as_int();
      const std::string expected = bytes_at(file, offset, length);
      SCOPED_TRACE(fmt::format("{} at byte {}", file.path().string(), offset));
      if (!index.find("offset")) {
        const Pickle object = read_torch_object(file, offset, length, kZipGlobals);
        if (object.root().kind() == PickleKind::kList && object.root().size() == 1 &&
            object.root()[0].is_object("torch._utils._rebuild_tensor_v2") &&
            index.at("fqn").as_string().find("_extra_state") != std::string_view::npos) {
          EXPECT_EQ(extra_state_archive(), expected);
          ++extra_states;
        }
        continue;
      }
      const TensorItem item = parse_tensor_item(file, offset, length);
      const TensorItemLayout layout = tensor_item_layout(item.dtype, item.shape);
      ASSERT_EQ(layout.total_bytes(), length);
      EXPECT_EQ(item.payload_offset, offset + layout.head_bytes);
      EXPECT_EQ(item.payload_bytes, layout.payload_bytes);
      EXPECT_TRUE(item.contiguous);
      const std::string payload = bytes_at(file, item.payload_offset, item.payload_bytes);
      EXPECT_EQ(crc32(as_bytes(payload)), item.storage.crc32);
      EXPECT_EQ(layout.head() + payload + layout.tail(item.storage.crc32), expected);
      ++tensors;
    }
  }
  EXPECT_GT(tensors, 300);
  EXPECT_GT(extra_states, 50);
}

TEST(TorchZip, WritesCommonPtAsTorchDoes) {
  const auto path = support::test_data("llama_tp2pp2_mc0161/iter_0000010/common.pt");
  const ReadFile file(path);
  const TorchArchive archive = read_torch_archive(file, 0, file.size());
  EXPECT_EQ(archive.name, "common");
  EXPECT_EQ(torch_archive(read_torch_record(file, archive.at("data.pkl")), "common"),
            bytes_at(file, 0, file.size()));
  const Pickle common = read_torch_object(file, 0, file.size(), kZipGlobals);
  EXPECT_EQ(common.root().at("iteration").as_int(), 10);
  EXPECT_EQ(common.root().at("args").at("num_layers").as_int(), 4);
}

TEST(TorchZip, ReadsBackEveryDTypeAnywhereInAFile) {
  for (const DType dtype :
       {DType::kBool, DType::kU8, DType::kI8, DType::kI16, DType::kI32, DType::kI64, DType::kF8E4M3,
        DType::kF8E5M2, DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    for (const Shape& shape :
         {Shape(), Shape({0}), Shape({2, 0, 3}), Shape({7}), Shape({300, 70}), Shape({1, 24, 32}),
          Shape({2, 3, 4, 5}), Shape({2, 1, 3, 1, 2, 5})}) {
      SCOPED_TRACE(fmt::format("{} {}", torch_name(dtype), to_string(shape)));
      const std::string archive = tensor_archive(dtype, shape);
      const ByteFile file("elsewhere" + archive + "after");
      const auto length = static_cast<std::int64_t>(archive.size());
      const TensorItem item = parse_tensor_item(file.file(), 9, length);
      EXPECT_EQ(item.dtype, dtype);
      EXPECT_EQ(item.shape, shape);
      EXPECT_TRUE(item.contiguous);
      EXPECT_EQ(item.payload_bytes, shape.product() * size_of(dtype));
      EXPECT_EQ((item.payload_offset - 9) % 64, 0);
      EXPECT_EQ(bytes_at(file.file(), item.payload_offset, item.payload_bytes),
                pattern(item.payload_bytes));
    }
  }
}

TEST(TorchZip, PicklesAn8BitFloatAsTorchDoes) {
  const ByteFile file(tensor_archive(DType::kF8E4M3, {300, 300}));
  const TorchArchive archive = read_torch_archive(file.file(), 0, file.file().size());
  EXPECT_EQ(
      read_torch_record(file.file(), archive.at("data.pkl")),
      "\x80\x02"
      "ctorch._utils\n_rebuild_tensor_v3\nq\x00((X\x07\x00\x00\x00storageq\x01"
      "ctorch.storage\nUntypedStorage\nq\x02X\x01\x00\x00\x00"
      "0q\x03X\x03\x00\x00\x00"
      "cpuq\x04J\x90\x5F\x01\x00tq\x05QK\x00M\x2C\x01M\x2C\x01\x86q\x06M\x2C\x01K\x01\x86q\x07"
      "\x89"
      "ccollections\nOrderedDict\nq\x08)Rq\x09"
      "ctorch\nfloat8_e4m3fn\nq\x0A"
      "tq\x0BRq\x0C."s);
}

// 4 GiB and a little: sizes and positions no longer fit into the fields of 1989.
TEST(TorchZip, ReadsBackRecordsBeyond4GiB) {
  const support::TempDir folder;
  for (const std::int64_t elements :
       {std::int64_t{0xFFFFFFFE}, std::int64_t{0xFFFFFFFF}, (std::int64_t{1} << 32) + 5}) {
    const TensorItemLayout layout = tensor_item_layout(DType::kU8, {elements});
    const std::string head = layout.head();
    const std::string tail = layout.tail(0x12345678);
    ASSERT_EQ(static_cast<std::int64_t>(head.size()), layout.head_bytes);
    ASSERT_EQ(static_cast<std::int64_t>(tail.size()), layout.tail_bytes);
    const auto path = folder / fmt::format("{}", elements);
    {
      const WriteFile file(path, layout.total_bytes());  // a hole where the payload lies
      file.write_at(0, as_bytes(head));
      file.write_at(layout.head_bytes + layout.payload_bytes, as_bytes(tail));
    }
    const ReadFile file(path);
    const TensorItem item = parse_tensor_item(file, 0, file.size());
    EXPECT_EQ(item.shape, Shape({elements}));
    EXPECT_EQ(item.payload_offset, layout.head_bytes);
    EXPECT_EQ(item.payload_bytes, elements);
    EXPECT_EQ(item.storage.crc32, 0x12345678U);
  }
}

TEST(TorchZip, LaysOutTheSameTensorTheSameWay) {
  const TensorItemLayout layout = tensor_item_layout(DType::kBF16, {24, 32});
  EXPECT_EQ(layout.head(), layout.head());
  EXPECT_EQ(layout.tail(7), layout.tail(7));
  EXPECT_NE(layout.tail(7), layout.tail(8));
  EXPECT_THROW(tensor_item_layout(DType::kF64, {std::int64_t{1} << 40, std::int64_t{1} << 40}),
               Error);
}

TEST(TorchZip, ReadsPartsOfAStorage) {
  const TensorItem whole = parse_archive_of(archive_of({}));
  EXPECT_TRUE(whole.contiguous);
  const TensorItem rows =
      parse_archive_of(archive_of({.first = 4, .shape = {2, 4}, .strides = {4, 1}}));
  EXPECT_TRUE(rows.contiguous);
  EXPECT_EQ(rows.payload_offset, whole.payload_offset + 16);
  EXPECT_EQ(rows.payload_bytes, 32);
  EXPECT_EQ(rows.storage.size, 48);
  EXPECT_FALSE(parse_archive_of(archive_of({.shape = {4, 3}, .strides = {1, 4}})).contiguous);
  EXPECT_FALSE(parse_archive_of(archive_of({.shape = {3, 2}, .strides = {4, 1}})).contiguous);
  EXPECT_FALSE(parse_archive_of(archive_of({.shape = {100, 12}, .strides = {0, 1}})).contiguous);
  EXPECT_TRUE(parse_archive_of(archive_of({.shape = {1, 12}, .strides = {99, 1}})).contiguous);
}

TEST(TorchZip, ReadsParametersAndSubclasses) {
  PickleWriter parameter;
  parameter.begin_call("torch._utils._rebuild_parameter");
  write(parameter, {});
  parameter.boolean(true).begin_call("collections.OrderedDict").end_call().end_call();
  EXPECT_EQ(parse_archive_of(archive_of(parameter)).shape, Shape({3, 4}));

  PickleWriter subclass;
  subclass.begin_call("torch._tensor._rebuild_from_type_v2");
  subclass.global("torch._utils._rebuild_tensor_v2").global("torch.nn.parameter.Parameter");
  subclass.begin_tuple().begin_persistent_id().string("storage").global("torch.FloatStorage");
  subclass.string("0").string("cuda:0").integer(12).end_persistent_id();
  subclass.integer(0).integers({12}).integers({1}).boolean(false).none().end_tuple();
  subclass.begin_dict().end_dict().end_call();
  EXPECT_EQ(parse_archive_of(archive_of(subclass)).shape, Shape({12}));
}

TEST(TorchZip, RefusesATensorThatItsStorageDoesNotHold) {
  const auto refused = [](const Rebuild& rebuild) {
    const std::string message = archive_error_of(archive_of(rebuild));
    return message.find("leaves its storage of 12 elements") != std::string::npos;
  };
  EXPECT_TRUE(refused({.shape = {4, 4}}));
  EXPECT_TRUE(refused({.first = 1}));
  EXPECT_TRUE(refused({.first = -1}));
  EXPECT_TRUE(refused({.shape = {3, 4}, .strides = {5, 1}}));
  EXPECT_TRUE(refused({.shape = {3, 4}, .strides = {-4, 1}}));
  EXPECT_TRUE(refused({.shape = {3, 4}, .strides = {std::int64_t{1} << 62, 1}}));
  EXPECT_TRUE(refused({.first = std::numeric_limits<std::int64_t>::max()}));
  EXPECT_TRUE(refused({.first = 13, .shape = {0}, .strides = {1}}));
  const auto message = [](const Rebuild& rebuild) { return archive_error_of(archive_of(rebuild)); };
  EXPECT_NE(message({.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40}}), "no error");
  EXPECT_NE(message({.shape = {-1, 4}}), "no error");
  EXPECT_NE(message({.shape = {3, 4}, .strides = {1}}), "no error");
  EXPECT_NE(message({.count = 13}), "no error");
  EXPECT_NE(message({.storage_class = "torch.DoubleStorage"}), "no error");
  EXPECT_EQ(message({.key = "1"}), "archive archive has no record data/1");
}

TEST(TorchZip, RefusesAPickleThatIsNoTensor) {
  PickleWriter list;
  list.begin_list().integer(7).end_list();
  EXPECT_EQ(archive_error_of(archive_of(list)), "the pickle holds [7] where object is expected");
  PickleWriter call;
  call.begin_call("os.system").string("ls").end_call();
  EXPECT_NE(archive_error_of(archive_of(call))
                .find("names os.system at byte 66, which is outside the closed"),
            std::string::npos);
}

TEST(TorchZip, ComputesTheChecksumOfZip) {
  EXPECT_EQ(crc32(as_bytes("123456789")), 0xCBF43926U);
  EXPECT_EQ(crc32({}), 0U);
}
}  // namespace torch_zip_test
}  // namespace ferry::distckpt
