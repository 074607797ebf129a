#include "models/tensor_parallel/mappings.h"

#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "distckpt/base/error.h"

namespace ferry::models {
namespace {

class Mapped : public torch::autograd::Function<Mapped> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x,
                            const Mapping& forward,
                            const Mapping& backward) {
    context->saved_data["backward"] =
        c10::IValue::make_capsule(c10::make_intrusive<Holder>(backward));
    auto y = forward(x);
    return y.is_same(x) ? x.view_as(x) : y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto capsule = context->saved_data["backward"].toCapsule();
    const auto& map = static_cast<const Holder*>(capsule.get())->map;
    return {map(gradients[0].contiguous()), at::Tensor(), at::Tensor()};
  }

 private:
  struct Holder : torch::CustomClassHolder {
    explicit Holder(Mapping to) : map(std::move(to)) {}
    Mapping map;
  };
};

at::Tensor mine(const at::Tensor& x, const ProcessGroup& group, std::int64_t dim) {
  const auto size = x.size(dim) / group.size();
  require(size * group.size() == x.size(dim), ErrorKind::kBug, "{} of {} over {} ranks", dim,
          x.size(dim), group.size());
  return x.narrow(dim, group.rank() * size, size).contiguous();
}

// [n, size * c] -> [size * n, c]
at::Tensor stacked(const at::Tensor& wide, int size) {
  const auto rows = wide.size(0);
  const auto channels = wide.size(1) / size;
  return wide.view({rows, size, channels}).permute({1, 0, 2}).reshape({rows * size, channels});
}

}  // namespace

at::Tensor mapped(const at::Tensor& x, const Mapping& forward, const Mapping& backward) {
  return Mapped::apply(x, forward, backward);
}

// The groups outlive the graph: they belong to the mesh.
at::Tensor copy_to_tensor_model_parallel_region(const at::Tensor& x, const ProcessGroup& group) {
  if (group.size() == 1) return x;
  return mapped(
      x, [](const at::Tensor& t) { return t; },
      [&group](const at::Tensor& t) { return group.all_reduce(t); });
}

at::Tensor reduce_from_tensor_model_parallel_region(const at::Tensor& x,
                                                    const ProcessGroup& group) {
  if (group.size() == 1) return x;
  return mapped(
      x, [&group](const at::Tensor& t) { return group.all_reduce(t); },
      [](const at::Tensor& t) { return t; });
}

at::Tensor gather_from_tensor_model_parallel_region(const at::Tensor& x,
                                                    const ProcessGroup& group,
                                                    bool replicated) {
  if (group.size() == 1) return x;
  return mapped(
      x, [&group](const at::Tensor& t) { return group.all_gather_channels(t); },
      [&group, replicated](const at::Tensor& t) {
        return replicated ? mine(t, group, 1) : group.reduce_scatter(stacked(t, group.size()));
      });
}

at::Tensor gather_from_sequence_parallel_region(const at::Tensor& x,
                                                const ProcessGroup& group,
                                                bool replicated) {
  if (group.size() == 1) return x;
  return mapped(
      x, [&group](const at::Tensor& t) { return group.all_gather(t); },
      [&group, replicated](const at::Tensor& t) {
        return replicated ? mine(t, group, 0) : group.reduce_scatter(t);
      });
}

at::Tensor scatter_to_sequence_parallel_region(const at::Tensor& x, const ProcessGroup& group) {
  if (group.size() == 1) return x;
  return mapped(
      x, [&group](const at::Tensor& t) { return mine(t, group, 0); },
      [&group](const at::Tensor& t) { return group.all_gather(t); });
}

at::Tensor reduce_scatter_to_sequence_parallel_region(const at::Tensor& x,
                                                      const ProcessGroup& group) {
  if (group.size() == 1) return x;
  return mapped(
      x, [&group](const at::Tensor& t) { return group.reduce_scatter(t); },
      [&group](const at::Tensor& t) { return group.all_gather(t); });
}

at::Tensor all_to_all(const at::Tensor& x,
                      const ProcessGroup& group,
                      const std::vector<std::int64_t>& send_rows,
                      const std::vector<std::int64_t>& receive_rows) {
  if (group.size() == 1) return x;
  return mapped(
      x,
      [&group, send_rows, receive_rows](const at::Tensor& t) {
        return group.all_to_all(t, send_rows, receive_rows);
      },
      [&group, send_rows, receive_rows](const at::Tensor& t) {
        return group.all_to_all(t, receive_rows, send_rows);
      });
}

at::Tensor all_to_all_sequence_to_hidden(const at::Tensor& x, const ProcessGroup& group) {
  if (group.size() == 1) return x;
  return mapped(
      x, [&group](const at::Tensor& t) { return group.all_to_all(stacked(t, group.size())); },
      [&group](const at::Tensor& t) { return side_by_side(group.all_to_all(t), group.size()); });
}

at::Tensor all_to_all_hidden_to_sequence(const at::Tensor& x, const ProcessGroup& group) {
  if (group.size() == 1) return x;
  return mapped(
      x, [&group](const at::Tensor& t) { return side_by_side(group.all_to_all(t), group.size()); },
      [&group](const at::Tensor& t) { return group.all_to_all(stacked(t, group.size())); });
}

}  // namespace ferry::models
