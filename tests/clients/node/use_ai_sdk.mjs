// Vercel's AI SDK: chat, a stream, tools and typed answers with three providers; prints what came, as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const SEEDS = 12;
const at = { baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY };
const openai = createOpenAI(at);
const compatible = createOpenAICompatible({ name: "athanor", supportsStructuredOutputs: true, ...at });
const verdict = z.object({ allowed: z.boolean(), because: z.enum(["yes", "no"]) });
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.enum(["Oslo", "Bonn"]) }),
  execute: async ({ city }) => `${city}: rain`,
});

// An agent that has to call at first and may call no more then; all its requests have tools and a schema.
function asked(model, seed) {
  return {
    model,
    prompt: "What is the weather in Oslo and in Bonn?",
    tools: { weather },
    seed,
    temperature: 1,
    output: Output.object({ schema: verdict }),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    stopWhen: stepCountIs(2),
  };
}

async function turn(model) {
  let ended, calls, seed;
  for (seed = 0; seed < SEEDS; seed++) {
    ended = await generateText(asked(model, seed));
    calls = ended.steps[0].toolCalls.map((call) => call.input);
    if (calls.length > 1) break;
  }
  const streamed = streamText(asked(model, seed));
  const again = (await streamed.steps)[0].toolCalls.map((call) => call.input);
  return { calls, streamed_calls: again, answer: ended.output };
}

async function use(make) {
  const plain = make("athanor-mini");
  const pieces = [];
  for await (const piece of streamText({ model: plain, prompt: "What is a tenant?" }).textStream) pieces.push(piece);
  const typed = { model: plain, prompt: "May beta use this model?", output: Output.object({ schema: verdict }) };
  const both = { model: make("hermes"), prompt: "?", tools: { weather }, temperature: 0, stopWhen: stepCountIs(8) };
  return {
    chat: (await generateText({ model: plain, prompt: "What is a tenant?" })).text,
    stream: pieces,
    structured: (await generateText(typed)).output,
    agent: (await generateText({ ...both, output: Output.object({ schema: verdict }) })).output,
    ...(await turn(make("several"))),
  };
}

console.log(
  JSON.stringify({
    "chat completions": await use((name) => openai.chat(name)),
    responses: await use((name) => openai.responses(name)),
    compatible: await use((name) => compatible(name)),
  }),
);
