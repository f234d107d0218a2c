// OpenAI's npm client against the server at OPENAI_BASE_URL: prints what it was answered, as JSON, for the test to check.
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const model = "fake";
const messages = [{ role: "user", content: "Hello" }];
const told = {};

told.models = (await client.models.list()).data.map((card) => card.id);
const whole = await client.chat.completions.create({ model, messages, max_tokens: 12 });
told.chat = whole.choices[0].message.content;
told.tokens = whole.usage.completion_tokens;
told.streamed = "";
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 12, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  told.streamed += chunk.choices[0]?.delta?.content ?? "";
  told.streamedTokens = chunk.usage?.completion_tokens ?? told.streamedTokens;
}
const helper = client.chat.completions.stream({ model, messages, max_tokens: 40, stop: ["three"] });
told.helper = (await helper.finalChatCompletion()).choices[0].finish_reason;
told.completion = (await client.completions.create({ model, prompt: "Hello", max_tokens: 12 })).choices[0].text;
const response = await client.responses.create({ model, input: "Hello", max_output_tokens: 12 });
told.response = response.output_text;
told.events = [];
for await (const event of await client.responses.create({ model, input: "Hello", max_output_tokens: 12, stream: true })) {
  told.events.push(event.type);
}
told.errors = {};
const failing = {
  bad: () => client.chat.completions.create({ model, messages, temperature: 9, stream: true }),
  missing: () => client.chat.completions.create({ model: "other", messages }),
  unknown: () => new OpenAI({ apiKey: "wrong", maxRetries: 0 }).models.list(),
};
for (const [name, call] of Object.entries(failing)) {
  try {
    await call();
    told.errors[name] = "none";
  } catch (error) {
    told.errors[name] = [error.constructor.name, error.status, error.param ?? null];
  }
}
const leaving = new AbortController();
const long = await client.chat.completions.create(
  { model, messages, max_tokens: 400, stream: true }, { signal: leaving.signal },
);
for await (const chunk of long) {
  told.left = Boolean(chunk.id);
  break; // which ends the connection
}
console.log(JSON.stringify(told));
