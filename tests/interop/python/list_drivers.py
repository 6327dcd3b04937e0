"""Lists the drivers by the node API on a Unix socket, with grpcio and without generated code.

Makes two calls on one channel and writes each response to standard output in hex, one line each.
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
