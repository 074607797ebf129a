#include "serve/api_server.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <exception>
#include <iterator>
#include <utility>

#include "serve/api/chat_prompt.h"
#include "serve/api/fields.h"

namespace ferry::serve {
namespace {

constexpr std::string_view kModels = "/v1/models/";  // a model's name follows
constexpr std::string_view kGet = "GET", kPost = "POST";
constexpr std::size_t kLargeBody = std::size_t{128} << 10;  // a few milliseconds
constexpr std::size_t kHugeBody = std::size_t{2} << 20;     // tenths of a second

void answer_json(const std::shared_ptr<Exchange>& exchange, const ordered_json& value) {
  exchange->respond({.body = dump(value)});
}

// Its JSON is written where it is made.
std::function<void(const std::shared_ptr<Exchange>&)> answer_of(const ordered_json& value) {
  return [text = dump(value)](const auto& exchange) { exchange->respond({.body = text}); };
}

// Answers a request by another method than the path's; OPTIONS asks which ones there are.
HttpResponse other_method(const HttpRequest& request, std::string_view method) {
  const HttpHeaders allow{
      {"Allow", fmt::format("{}, {}OPTIONS", method, method == kGet ? "HEAD, " : "")}};
  if (request.method == "OPTIONS") return {.headers = allow};
  const ApiError error(405, fmt::format("{} is asked by {}", request.path, method));
  return {.status = error.status(), .body = error.body(), .headers = allow};
}

HttpResponse response_of(const ApiError& error) {
  return {.status = error.status(), .body = error.body()};
}

// A browser asks so before it sends a request of a page that has more than a form's headers.
bool is_preflight(const HttpRequest& request) {
  return request.method == "OPTIONS" && !request.header("origin").empty() &&
         !request.header("access-control-request-method").empty();
}

}  // namespace

ApiServer::ApiServer(ServedModel model,
                     EngineFleet& engine,
                     ServerOptions server,
                     ApiOptions options)
    : model_(std::move(model)),
      texts_(model_.tokenizer),
      engine_(engine),
      options_(std::move(options)),
      metrics_(model_.name, engine.size()),
      random_(std::random_device()()),
      created_(std::time(nullptr)),
      http_(
          std::move(server),
          [this](const std::shared_ptr<Exchange>& exchange) { handle(exchange); },
          [](int status, const std::string& message) { return ApiError(status, message).body(); }) {
  http_.on_tick([this] { tick(); });
  http_.on_head([this](const HttpRequest& request) {
    auto refusal = refusal_of(request);
    if (refusal) std::ranges::move(headers_for(request), std::back_inserter(refusal->headers));
    return refusal;
  });
  engine_.on_outputs([this](std::size_t from, std::vector<rollout::RequestOutput> outputs,
                            const EngineStatus& now) {
    auto shared = std::make_shared<std::vector<rollout::RequestOutput>>(std::move(outputs));
    http_.post([this, from, shared, now] { take(from, std::move(*shared), now); });
  });
}

void ApiServer::run() {
  http_.run();
}

const std::map<std::string_view, ApiServer::Route>& ApiServer::routes() {
  static const std::map<std::string_view, Route> all{
      {"/v1/completions", {kPost, &ApiServer::completions}},
      {"/v1/chat/completions", {kPost, &ApiServer::chat_completions}},
      {"/v1/models", {kGet, &ApiServer::models}},
      {kModels, {kGet, &ApiServer::model}},
      {"/tokenize", {kPost, &ApiServer::tokenize}},
      {"/detokenize", {kPost, &ApiServer::detokenize}},
      {"/health", {kGet, &ApiServer::health, true}},
      {"/ping", {kGet, &ApiServer::health, true}},
      {"/version", {kGet, &ApiServer::version}},
      {"/metrics", {kGet, &ApiServer::metrics}},
      {"/pause", {kPost, &ApiServer::pause}},
      {"/resume", {kPost, &ApiServer::resume}},
      {"/is_paused", {kGet, &ApiServer::is_paused}},
      {"/update_weights", {kPost, &ApiServer::update_weights}},
      {"/reset_prefix_cache", {kPost, &ApiServer::reset_prefix_cache}},
      {"/sleep", {kPost, &ApiServer::sleep}},
      {"/wake_up", {kPost, &ApiServer::wake_up}},
      {"/is_sleeping", {kGet, &ApiServer::is_sleeping}},
  };
  return all;
}

bool ApiServer::is_authorized(const HttpRequest& request) const {
  return options_.api_keys.empty() || std::ranges::any_of(options_.api_keys, [&](const auto& key) {
           return request.has_bearer(key);
         });
}

// Pages of the site may ask. Without API keys any page could control a server on loopback.
bool ApiServer::allows(std::string_view origin) const {
  const auto& allowed = options_.allowed_origins;
  if (allowed.empty()) return !options_.api_keys.empty();
  return std::ranges::find(allowed, "*") != allowed.end() ||
         std::ranges::find(allowed, origin) != allowed.end();
}

// The headers of a response by which a browser gives it to a page of another site (Fetch, 3.2).
HttpHeaders ApiServer::headers_for(const HttpRequest& request) const {
  const auto origin = request.header("origin");
  if (origin.empty() || !allows(origin)) return {};
  const auto& allowed = options_.allowed_origins;
  const bool is_any = allowed.empty() || std::ranges::find(allowed, "*") != allowed.end();
  if (is_any) return {{"Access-Control-Allow-Origin", "*"}};
  return {{"Access-Control-Allow-Origin", std::string(origin)}, {"Vary", "Origin"}};
}

const ApiServer::Route* ApiServer::route_of(const HttpRequest& request) {
  const std::string_view path = request.path;
  const auto found = routes().find(path == kModels             ? "/v1/models"
                                   : path.starts_with(kModels) ? kModels
                                                               : path);
  return found == routes().end() ? nullptr : &found->second;
}

// The answer to a request that is not looked at further: its body is not needed for that.
std::optional<HttpResponse> ApiServer::refusal_of(const HttpRequest& request) const {
  constexpr const char* kAll = "GET, HEAD, POST, OPTIONS";
  const auto origin = request.header("origin");
  if (is_preflight(request) && allows(origin)) {
    const auto asked = request.header("access-control-request-headers");
    return HttpResponse{
        .headers = {{"Access-Control-Allow-Methods", kAll},
                    {"Access-Control-Allow-Headers",
                     asked.empty() ? "Authorization, Content-Type" : std::string(asked)},
                    {"Access-Control-Max-Age", "600"}}};
  }
  if (request.path == "*") return HttpResponse{.headers = {{"Allow", kAll}}};  // of all paths
  const auto* const route = route_of(request);
  if (route == nullptr)
    return response_of({404, fmt::format("there is no {}", request.path), "", "unknown_url"});
  const auto& method = route->method;
  if (request.method != method && !(request.method == "HEAD" && method == kGet))
    return other_method(request, method);
  if (!origin.empty() && !allows(origin))
    return response_of({403, options_.allowed_origins.empty()
                                 ? "pages of other sites may not ask a server without API keys"
                                 : "pages of this site may not ask: --allowed-origins"});
  if (!route->is_open && !is_authorized(request))
    return response_of({401, "the API key is missing or wrong", "", "invalid_api_key"});
  const auto coding = request.header("content-encoding");
  if (!coding.empty() && lower_case(coding) != "identity")
    return response_of({415, fmt::format("the body is {}: it has to be plain", coding)});
  return std::nullopt;
}

template <typename Answer>
void ApiServer::answer_or_refuse(const ExchangePtr& exchange, const Answer& answer) {
  try {
    answer();
  } catch (const ApiError& error) {
    exchange->respond(response_of(error));
  } catch (const Error& error) {
    exchange->respond(response_of(api_error(error)));
  }
}

void ApiServer::handle(const ExchangePtr& exchange) {
  const auto& request = exchange->request();
  exchange->add_headers(headers_for(request));
  if (auto refusal = refusal_of(request)) return exchange->respond(*std::move(refusal));
  answer_or_refuse(exchange, [&] { (this->*route_of(request)->answer)(exchange); });
}

void ApiServer::answer_body(const ExchangePtr& exchange,
                            std::function<Rest(const ordered_json& body)> parse) {
  const auto size = exchange->request().body.size();
  if (size <= kLargeBody) {
    const auto rest = parse(parse_object(exchange->request().body));
    exchange->forget_body();
    return rest(exchange);
  }
  (size <= kHugeBody ? background_ : huge_bodies_).post([this, exchange, parse = std::move(parse)] {
    std::exception_ptr error;
    Rest rest;
    try {
      rest = parse(parse_object(exchange->request().body));
    } catch (...) {
      error = std::current_exception();
    }
    http_.post([exchange, rest, error] {
      exchange->forget_body();
      if (!exchange->is_open()) return;  // the client has gone
      try {
        answer_or_refuse(exchange, [&] {
          if (error) std::rethrow_exception(error);
          rest(exchange);
        });
      } catch (const std::exception& other) {
        exchange->respond({.status = 500, .body = ApiError(500, other.what()).body()});
      }
    });
  });
}

ApiServer::Rest ApiServer::generation_of(GenerationRequest request) {
  auto shared = std::make_shared<GenerationRequest>(std::move(request));
  return [this, shared](const ExchangePtr& exchange) { generate(std::move(*shared), exchange); };
}

void ApiServer::completions(const ExchangePtr& exchange) {
  answer_body(exchange, [this](const ordered_json& body) {
    return generation_of(parse_completion(body, model_));
  });
}

void ApiServer::chat_completions(const ExchangePtr& exchange) {
  answer_body(exchange, [this](const ordered_json& body) {
    return generation_of(parse_chat_completion(body, model_));
  });
}

void ApiServer::generate(GenerationRequest request, const ExchangePtr& exchange) {
  const auto most = model_.max_num_seqs + options_.max_queued_requests;
  // One client alone would keep all others out, and take memory for each answer.
  if (request.num_samples() > most) {
    const ApiError large(
        400,
        fmt::format("n: {} answers to {} prompts are more than the {} that the server takes",
                    request.params.n, request.prompts.size(), most),
        "n");
    return exchange->respond({.status = large.status(), .body = large.body()});
  }
  if (num_samples_ + request.num_samples() > most) {
    const ApiError busy(429, fmt::format("{} answers are under way: try again later", num_samples_),
                        "", "rate_limit_exceeded");
    return exchange->respond(
        {.status = 429, .body = busy.body(), .headers = {{"Retry-After", "1"}}});
  }
  auto id =
      fmt::format("{}-{:016x}{:016x}", request.is_chat ? "chatcmpl" : "cmpl", random_(), random_());
  const auto generation = std::make_shared<Generation>(
      std::move(request), model_, texts_, engine_, exchange, std::move(id),
      [this](const auto& to, auto make_body) { respond_later(to, std::move(make_body)); });
  num_samples_ += generation->num_samples();
  for (std::size_t i = 0; i < generation->num_prompts(); ++i)
    prompts_[generation->engine_id(i)] = {generation, i};
  exchange->on_gone([this, weak = std::weak_ptr(generation)] {
    const auto gone = weak.lock();
    if (!gone || gone->is_over()) return;
    gone->abort(ApiError(499, "the client has gone"), metrics_.of(0));
    forget(*gone);
  });
  generation->start();
}

void ApiServer::respond_later(const ExchangePtr& exchange, std::function<std::string()> make_body) {
  background_.post([this, exchange, make_body = std::move(make_body)] {
    const auto response = std::make_shared<HttpResponse>();
    try {
      response->body = make_body();
    } catch (const std::exception& error) {
      *response = {.status = 500, .body = ApiError(500, error.what()).body()};
    }
    http_.post([exchange, response] { exchange->respond(std::move(*response)); });
  });
}

void ApiServer::forget(const Generation& generation) {
  num_samples_ -= generation.num_samples();
  for (std::size_t i = 0; i < generation.num_prompts(); ++i)
    prompts_.erase(generation.engine_id(i));
}

void ApiServer::take(std::size_t engine,
                     std::vector<rollout::RequestOutput> outputs,
                     const EngineStatus& status) {
  status_ = status;
  for (auto& output : outputs) {
    const auto found = prompts_.find(output.request_id);
    if (found == prompts_.end()) continue;  // its client has gone
    const auto [generation, index] = found->second;
    generation->take(index, std::move(output), status.weight_version, metrics_.of(engine));
    if (generation->is_over() && prompts_.contains(generation->engine_id(0))) forget(*generation);
  }
}

void ApiServer::tick() {
  const auto now = Clock::now();
  if (options_.request_timeout.count() > 0) {
    std::vector<std::shared_ptr<Generation>> late;
    for (const auto& [id, prompt] : prompts_) {
      if (prompt.index == 0 && now - prompt.generation->started() > options_.request_timeout)
        late.push_back(prompt.generation);
    }
    for (const auto& generation : late) {
      generation->abort(
          ApiError(504, "the answer took longer than the server allows", "", "timeout"),
          metrics_.of(0));
      forget(*generation);
    }
  }
  if (!is_stopping_ && options_.stop_requested && options_.stop_requested()) {
    is_stopping_ = true;
    stopped_ = now;
    http_.stop();
  }
  if (is_stopping_ && now - stopped_ > options_.shutdown_timeout) http_.close();
}

ordered_json ApiServer::model_card() const {
  return {{"id", model_.name},
          {"object", "model"},
          {"created", created_},
          {"owned_by", "ferry"},
          {"root", model_.root},
          {"parent", nullptr},
          {"max_model_len", model_.max_model_len}};
}

void ApiServer::models(const ExchangePtr& exchange) {
  answer_json(exchange, {{"object", "list"}, {"data", ordered_json::array({model_card()})}});
}

// A name may have slashes, as a client writes them or as %2F.
void ApiServer::model(const ExchangePtr& exchange) {
  const auto name = exchange->request().path_behind(kModels);
  if (name != model_.name)
    throw ApiError(404, fmt::format("the model {} does not exist: this is {}", name, model_.name),
                   "model", "model_not_found");
  answer_json(exchange, model_card());
}

void ApiServer::metrics(const ExchangePtr& exchange) {
  exchange->respond({.body = metrics_.text(engine_.statuses()),
                     .content_type = "text/plain; version=0.0.4; charset=utf-8"});
}

void ApiServer::health(const ExchangePtr& exchange) {
  exchange->respond({.body = "", .content_type = "text/plain"});
}

void ApiServer::version(const ExchangePtr& exchange) {
  answer_json(exchange, {{"version", options_.version}});
}

void ApiServer::tokenize(const ExchangePtr& exchange) {
  answer_body(exchange, [this](const ordered_json& body) { return tokens_of(body); });
}

ApiServer::Rest ApiServer::tokens_of(const ordered_json& body) const {
  check_model(body, model_);
  const Fields fields(body);
  const auto& tokenizer = model_.require_tokenizer("prompt");
  std::vector<std::int64_t> ids;
  if (fields.has("messages")) {
    ids = chat_prompt(body, model_).token_ids;
  } else {
    std::optional<std::string> prompt;
    fields.read("prompt", prompt);
    if (!prompt) fields.refuse("prompt", "is missing");
    bool special = true;
    fields.read("add_special_tokens", special);
    const auto encoded = tokenizer.encode(*prompt, {.add_special_tokens = special});
    ids.assign(encoded.begin(), encoded.end());
  }
  bool with_texts = false;
  fields.read("return_token_strs", with_texts);
  ordered_json strings;
  if (with_texts) {
    strings = ordered_json::array();
    for (const auto id : ids)
      strings.push_back(
          tokenizer.id_to_token(static_cast<rollout::text::TokenId>(id)).value_or(""));
  }
  return answer_of({{"count", ids.size()},
                    {"max_model_len", model_.max_model_len},
                    {"tokens", ids},
                    {"token_strs", std::move(strings)}});
}

void ApiServer::detokenize(const ExchangePtr& exchange) {
  answer_body(exchange, [this](const ordered_json& body) { return text_of(body); });
}

ApiServer::Rest ApiServer::text_of(const ordered_json& body) const {
  check_model(body, model_);
  const Fields fields(body);
  std::optional<std::vector<std::int64_t>> ids;
  fields.read("tokens", ids);
  if (!ids) fields.refuse("tokens", "is missing");
  std::vector<rollout::text::TokenId> tokens;
  for (const auto id : *ids) {
    if (id < 0 || id >= model_.vocab_size)
      fields.refuse("tokens", fmt::format("{} is no token", id));
    tokens.push_back(static_cast<rollout::text::TokenId>(id));
  }
  const auto text =
      model_.require_tokenizer("tokens").decode(tokens, {.skip_special_tokens = false});
  return answer_of({{"prompt", text}});
}

}  // namespace ferry::serve
