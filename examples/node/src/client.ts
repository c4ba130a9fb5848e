// A client of kvpool: blocks by their hashes, with the bytes inside of gRPC calls. Its types are generated from the proto.
import { fileURLToPath } from "node:url";
import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { createXXHash3, type IHasher } from "hash-wasm";
import type { ProtoGrpcType } from "./generated/pool.js";
import type { Chunk } from "./generated/kvpool/v1/Chunk.js";
import type { GetChunksResponse__Output } from "./generated/kvpool/v1/GetChunksResponse.js";
import type { LookupResponse__Output } from "./generated/kvpool/v1/LookupResponse.js";
import type { NamespaceSpec } from "./generated/kvpool/v1/NamespaceSpec.js";
import type { OpenNamespaceResponse__Output } from "./generated/kvpool/v1/OpenNamespaceResponse.js";
import type { PoolClient } from "./generated/kvpool/v1/Pool.js";

const PROTO_ROOT = fileURLToPath(new URL("../../../proto", import.meta.url));
const GRANTED = 0;
const PRESENT = 1;
// Longs as strings: @grpc/proto-loader cannot make BigInts, and a checksum has 64 bits.
const OPTIONS = { longs: String, enums: String, defaults: true, oneofs: true, includeDirs: [PROTO_ROOT] };

/** What a block's bytes belong to, and their size. `fingerprint` names it in every call. */
export interface Namespace {
  fingerprint: Buffer;
  chunkBytes: number;
}

/** A chunk whose bytes differ from its checksum. Treat it as a miss. */
export class ChecksumError extends Error {}

export class KVPool {
  private constructor(
    private readonly stub: PoolClient,
    private readonly hasher: IHasher,
    private readonly timeoutMs: number,
  ) {}

  /** Connects to HOST:PORT, or unix:PATH. Every call takes at most `timeoutMs`. */
  static async connect(
    endpoint: string,
    { credentials = grpc.credentials.createInsecure(), timeoutMs = 5_000 } = {},
  ): Promise<KVPool> {
    const loaded = grpc.loadPackageDefinition(loadSync("kvpool/v1/pool.proto", OPTIONS));
    const { Pool } = (loaded as unknown as ProtoGrpcType).kvpool.v1;
    return new KVPool(new Pool(endpoint, credentials), await createXXHash3(), timeoutMs);
  }

  /** Opens a namespace of one group. Programs share blocks only if every field of the specification is equal. */
  async openNamespace(spec: NamespaceSpec): Promise<Namespace> {
    const opened = await this.unary<OpenNamespaceResponse__Output>((options, done) =>
      this.stub.openNamespace({ spec }, options, done),
    );
    return { fingerprint: opened.fingerprint, chunkBytes: Number(spec.groups?.[0]?.chunkBytes) };
  }

  /** How many blocks from the first on are there. An existence check: it takes no lease, and renews nothing. */
  async lookup(namespace: Namespace, blockHashes: Buffer[]): Promise<number> {
    const runs = [{ groupIdx: 0, blockHashes: Buffer.concat(blockHashes) }];
    const found = await this.unary<LookupResponse__Output>((options, done) =>
      this.stub.lookup({ namespace: namespace.fingerprint, runs, prefixOnly: true }, options, done),
    );
    return found.hits[0]?.numLeading ?? 0;
  }

  /** Stores blocks; returns how many are readable now. The others had no room, or are being written by somebody else. */
  async put(namespace: Namespace, blocks: { blockHash: Buffer; payload: Buffer }[]): Promise<number> {
    const answer = new Promise<Buffer>((resolve, reject) => {
      const call = this.stub.putChunks({ deadline: this.deadline() }, (error, reply) =>
        error ? reject(error) : resolve(reply!.statuses),
      );
      for (const { blockHash, payload } of blocks) {
        const chunk: Chunk = {
          key: { namespace: namespace.fingerprint, groupIdx: 0, blockHash, shard: 0 },
          payload,
          checksum: this.checksum(payload),
        };
        call.write({ chunks: [chunk] });
      }
      call.end();
    });
    return [...(await answer)].filter((status) => status === GRANTED || status === PRESENT).length;
  }

  /** Loads blocks, verified; null for each miss. Throws ChecksumError for wrong bytes. */
  async get(namespace: Namespace, blockHashes: Buffer[]): Promise<(Buffer | null)[]> {
    const keys = blockHashes.map((blockHash) => ({
      namespace: namespace.fingerprint,
      groupIdx: 0,
      blockHash,
      shard: 0,
    }));
    const found: (Buffer | null)[] = blockHashes.map(() => null);
    for await (const each of this.stub.getChunks({ keys }, { deadline: this.deadline() })) {
      const { index, chunk, found: isHit } = each as GetChunksResponse__Output;
      if (!isHit || !chunk) continue;
      if (this.checksum(chunk.payload) !== String(chunk.checksum)) {
        throw new ChecksumError(`block ${blockHashes[index]?.toString("hex")} differs from its checksum`);
      }
      found[index] = chunk.payload;
    }
    return found;
  }

  close(): void {
    this.stub.close();
  }

  /** The xxh3-64 of bytes, as a decimal number. */
  checksum(payload: Buffer): string {
    return BigInt(`0x${this.hasher.init().update(payload).digest("hex")}`).toString();
  }

  private deadline(): Date {
    return new Date(Date.now() + this.timeoutMs);
  }

  private unary<Reply>(
    call: (options: grpc.CallOptions, done: grpc.requestCallback<Reply>) => grpc.ClientUnaryCall,
  ): Promise<Reply> {
    return new Promise((resolve, reject) => {
      call({ deadline: this.deadline() }, (error, reply) => (error ? reject(error) : resolve(reply!)));
    });
  }
}
