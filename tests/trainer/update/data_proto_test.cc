#include "trainer/update/data_proto.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"

namespace ferry::trainer {
namespace data_proto_test {

using nlohmann::json;
using support::fails;
using Rows = std::vector<std::int64_t>;

// Each row is known by its number in every column.
DataProto numbered(std::int64_t rows) {
  const auto number = at::arange(rows);
  std::vector<json> uid, mixed;
  for (std::int64_t i = 0; i < rows; ++i) {
    uid.push_back("uid-" + std::to_string(i));
    mixed.push_back(i % 2 == 0 ? json{{"index", i}, {"x", 0.1 * static_cast<double>(i)}}
                               : json(nullptr));
  }
  return DataProto({{"id", number},
                    {"half", number.unsqueeze(1).expand({rows, 3}).to(at::kBFloat16)},
                    {"mask", (number % 3 == 0).unsqueeze(1)}},
                   {{"uid", uid}, {"mixed", mixed}}, {{"temperature", 0.7}, {"step", 3}});
}

Rows ids(const DataProto& data) {
  const auto id = data.tensor("id").contiguous();
  return {id.const_data_ptr<std::int64_t>(), id.const_data_ptr<std::int64_t>() + id.numel()};
}

// All columns still speak of the same rows.
void expect_rows(const DataProto& data, const Rows& expected) {
  ASSERT_EQ(ids(data), expected);
  EXPECT_EQ(data.size(), static_cast<std::int64_t>(expected.size()));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(data.column("uid")[i], "uid-" + std::to_string(expected[i]));
    EXPECT_EQ(data.column("mixed")[i].is_null(), expected[i] % 2 == 1);
    EXPECT_EQ(data.tensor("half")[static_cast<std::int64_t>(i)][2].item<double>(),
              static_cast<double>(expected[i]));
  }
  EXPECT_EQ(data.meta_info, (json{{"temperature", 0.7}, {"step", 3}}));
}

void expect_same(const DataProto& left, const DataProto& right) {
  EXPECT_EQ(left.to_bytes(), right.to_bytes());
}

Rows shuffled(std::int64_t rows, std::mt19937_64& random) {
  Rows order(static_cast<std::size_t>(rows));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  std::ranges::shuffle(order, random);
  return order;
}

TEST(DataProto, RowsMoveTogether) {
  const auto data = numbered(5);
  expect_rows(data.slice(1, 4), {1, 2, 3});
  expect_rows(data.select_idxs(Rows{4, 4, 0}), {4, 4, 0});
  expect_rows(data.reorder(Rows{2, 0, 1, 4, 3}), {2, 0, 1, 4, 3});
  expect_rows(data.slice(0, 2).repeat(3), {0, 0, 0, 1, 1, 1});
  expect_rows(data.slice(0, 2).repeat(3, /*interleave=*/false), {0, 1, 0, 1, 0, 1});
  expect_rows(data, {0, 1, 2, 3, 4});
}

TEST(DataProto, WhatIsCutAndPutTogetherIsTheSame) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 40; ++round) {
    const auto rows = static_cast<std::int64_t>(1 + random() % 23);
    const auto divisor = static_cast<std::int64_t>(1 + random() % 40);
    const auto data = numbered(rows);
    const auto [padded, pad_size] = pad_dataproto_to_divisor(data, divisor);
    EXPECT_EQ(padded.size() % divisor, 0);
    EXPECT_LT(pad_size, divisor);
    Rows expected;
    for (std::int64_t i = 0; i < rows + pad_size; ++i) expected.push_back(i % rows);
    expect_rows(padded, expected);
    const auto chunks = padded.chunk(divisor);
    ASSERT_EQ(static_cast<std::int64_t>(chunks.size()), divisor);
    for (const auto& chunk : chunks) EXPECT_EQ(chunk.size(), padded.size() / divisor);
    expect_same(unpad_dataproto(DataProto::concat(chunks), pad_size), data);
    expect_same(DataProto::concat(data.split(divisor)), data);

    const auto order = shuffled(rows, random);
    expect_same(data.reorder(order).reorder(inverse_order(order)), data);
  }
}

TEST(DataProto, ColumnsAreChosenTakenRenamedAndUnited) {
  auto data = numbered(4);
  const std::vector<std::string> some{"id", "uid"}, one{"half"};
  const auto selected = data.select(some);
  EXPECT_EQ(selected.batch().size(), 1U);
  EXPECT_EQ(selected.non_tensor_batch().size(), 1U);
  const auto whole = data;
  const auto popped = data.pop(one);
  EXPECT_FALSE(data.batch().contains("half"));
  expect_same(data.union_with(popped), whole);
  expect_same(whole.union_with(whole), whole);
  const auto renamed = whole.rename("uid", "name").rename("id", "number");
  EXPECT_EQ(renamed.column("name"), whole.column("uid"));
  EXPECT_TRUE(renamed.tensor("number").equal(whole.tensor("id")));
  EXPECT_EQ(renamed.size(), 4);
}

TEST(DataProto, BytesBringEverythingBack) {
  std::mt19937_64 random(12);
  for (int round = 0; round < 20; ++round) {
    auto data = numbered(static_cast<std::int64_t>(random() % 9));
    data.meta_info["text"] = std::string("\xff\0 not UTF-8", 12);
    data.set("strided", at::randn({3, data.size()}).t());
    data.set("nan", at::full({data.size(), 2}, std::nan("")));
    const auto bytes = data.to_bytes();
    const auto back = DataProto::from_bytes(bytes);
    EXPECT_EQ(back.to_bytes(), bytes);
    EXPECT_TRUE(back.tensor("strided").equal(data.tensor("strided")));
    EXPECT_EQ(back.tensor("mask").scalar_type(), at::kBool);
    EXPECT_EQ(back.meta_info, data.meta_info);
    EXPECT_EQ(back.non_tensor_batch(), data.non_tensor_batch());
  }
  EXPECT_EQ(DataProto::from_bytes(DataProto().to_bytes()).size(), 0);
}

TEST(DataProto, BytesThatAreCutOffOrDamagedAreNoBatch) {
  const auto bytes = numbered(3).to_bytes();
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"batch: "}, [&] {
      DataProto::from_bytes(std::span(bytes).first(size));
    })) << size;
  std::mt19937_64 random(13);
  int refused = 0;
  for (int round = 0; round < 2000; ++round) {
    auto damaged = bytes;
    damaged[random() % damaged.size()] ^= static_cast<std::byte>(1U << random() % 8);
    try {
      DataProto::from_bytes(damaged);
    } catch (const Error& error) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 500);
}

TEST(DataProto, BalancedChunksHaveAboutTheSameWork) {
  std::mt19937_64 random(14);
  const std::int64_t rows = 32, dp = 4;
  auto mask = at::zeros({rows, 100}, at::kLong);
  for (std::int64_t i = 0; i < rows; ++i)
    mask[i].slice(0, 0, static_cast<std::int64_t>(1 + random() % 100)).fill_(1);
  auto data = numbered(rows);
  data.set("attention_mask", mask);
  const auto order = balanced_order(data, dp);
  std::vector<double> tokens;
  for (const auto& chunk : data.reorder(order).chunk(dp))
    tokens.push_back(chunk.tensor("attention_mask").sum().item<double>());
  EXPECT_LT(std::ranges::max(tokens) - std::ranges::min(tokens), 10);
  expect_same(data.reorder(order).reorder(inverse_order(order)), data);
}

TEST(DataProto, RefusesWhatDoesNotFitTogether) {
  auto data = numbered(4);
  const auto usage = ErrorKind::kUsage;
  EXPECT_TRUE(
      fails(usage, {"batch: x has 5 rows, expected 4"}, [&] { data.set("x", at::zeros({5})); }));
  EXPECT_TRUE(fails(usage, {"batch: x has no rows"}, [&] { data.set("x", at::zeros({})); }));
  EXPECT_TRUE(fails(usage, {"batch: uid is no tensor"}, [&] { data.set("uid", at::zeros({4})); }));
  EXPECT_TRUE(fails(usage, {"batch: no tensor x"}, [&] { data.tensor("x"); }));
  EXPECT_TRUE(fails(usage, {"batch: 4 rows do not make 3 equal chunks"}, [&] { data.chunk(3); }));
  EXPECT_TRUE(fails(usage, {"batch: no row 4 of 4"}, [&] { data.select_idxs(Rows{4}); }));
  EXPECT_TRUE(fails(usage, {"is no permutation of 4"}, [&] { data.reorder(Rows{0, 1, 2, 2}); }));
  EXPECT_TRUE(fails(usage, {"batch: 0 rows cannot be padded"},
                    [&] { pad_dataproto_to_divisor(DataProto(), 2); }));
  auto other = data;
  other.set("id", at::arange(4) + 1);
  EXPECT_TRUE(fails(usage, {"batch: id differs on both sides"}, [&] { data.union_with(other); }));
  auto hot = data;
  hot.meta_info["temperature"] = 1;
  EXPECT_TRUE(fails(usage, {"meta_info temperature"}, [&] { data.union_with(hot); }));
  EXPECT_TRUE(fails(usage, {"meta_info temperature"}, [&] {
    DataProto::concat(std::vector{data, hot});
  }));
  const std::vector<std::string> id{"id"};
  EXPECT_TRUE(fails(usage, {"different columns"}, [&] {
    DataProto::concat(std::vector{data, data.select(id)});
  }));
}

}  // namespace data_proto_test
}  // namespace ferry::trainer
