// Small values of the host between ranks, of any type that distckpt/base/cbor.h can write.
#pragma once

#include <string_view>
#include <vector>

#include "distckpt/base/cbor.h"
#include "models/distributed/mailbox.h"
#include "models/distributed/process_group.h"

namespace ferry::models {

// The value of each rank, in the order of the ranks. Called by all ranks of the group.
template <typename T>
std::vector<T> gather(const ProcessGroup& group, const T& mine) {
  std::vector<T> all;
  for (const auto& bytes : group.all_gather_bytes(to_cbor(mine)))
    all.push_back(from_cbor<T>(bytes));
  return all;
}

// The value of rank `from` of the group. Called by all ranks of the group; `mine` is read on rank
// `from` only.
template <typename T>
T broadcast(const ProcessGroup& group, const T& mine, int from) {
  const auto all = group.all_gather_bytes(group.rank() == from ? to_cbor(mine) : "");
  return from_cbor<T>(all[static_cast<std::size_t>(from)]);
}

// Mailbox::send() and Mailbox::receive() for values.
template <typename T>
void send(const Mailbox& mail, const T& value, int to, std::string_view what) {
  mail.send(to_cbor(value), to, what);
}
template <typename T>
T receive(const Mailbox& mail, int from, std::string_view what) {
  return from_cbor<T>(mail.receive(from, what));
}

}  // namespace ferry::models
