#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    nodedock::testing::fuzz::api(data);
});
