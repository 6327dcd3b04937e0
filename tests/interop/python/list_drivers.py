"""Asks the node API on a Unix socket for its drivers, with grpcio and without generated code.

Two calls on one channel; each answer goes to standard output in hex, a line each.
"""

import sys

import grpc

METHOD = "/nodedock.node.v1.Node/ListDrivers"
DEADLINE_SECONDS = 10


def main() -> None:
    with grpc.insecure_channel(f"unix:{sys.argv[1]}") as channel:
        call = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)
        for _ in range(2):
            print(call(b"", timeout=DEADLINE_SECONDS).hex())


if __name__ == "__main__":
    main()
