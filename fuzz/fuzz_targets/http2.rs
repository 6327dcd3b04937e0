#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    nodedock_proto::fuzz::http2(data);
});
