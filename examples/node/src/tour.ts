// Stores blocks, looks them up and loads them: npm start -- HOST:PORT. Prints one object of JSON.
import { createHash, randomBytes } from "node:crypto";
import { KVPool } from "./client.js";

const CHUNK_BYTES = 65_536;
const pool = await KVPool.connect(process.argv[2] ?? "127.0.0.1:50051");
const group = { kind: "full_attention", blockTokens: 16, numKvHeads: 1, headSizeK: 64, headSizeV: 64, numShards: 1 };
const namespace = await pool.openNamespace({
  formatVersion: 1,
  model: "node-example",
  groups: [{ ...group, chunkBytes: CHUNK_BYTES }],
});
const blockHashes = ["first", "second", "never stored"].map((name) => createHash("sha256").update(name).digest());
const payloads = [randomBytes(CHUNK_BYTES), Buffer.alloc(CHUNK_BYTES, 7)];
const before = await pool.lookup(namespace, blockHashes);
const blocks = payloads.map((payload, nth) => ({ blockHash: blockHashes[nth]!, payload }));
const stored = await pool.put(namespace, blocks);
const after = await pool.lookup(namespace, blockHashes);
const loaded = await pool.get(namespace, blockHashes);
pool.close();
console.log(
  JSON.stringify({
    fingerprint: namespace.fingerprint.toString("hex"),
    before,
    stored,
    after,
    equal: payloads.map((payload, nth) => loaded[nth]?.equals(payload) ?? false),
    misses: loaded.filter((payload) => payload === null).length,
    checksum: pool.checksum(payloads[1]!),
  }),
);
