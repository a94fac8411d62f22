// Prints, for each query of a JSON array on standard input, where the grammar of TraceQL of Grafana's editor finds an error.
import { readFileSync } from "node:fs";
import { parser } from "@grafana/lezer-traceql";

const errors = (query) => {
  const found = [];
  parser.parse(query).iterate({ enter: (node) => { if (node.type.isError) found.push(node.from); } });
  return found;
};
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(errors)));
