#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    nodedockd::testing::fuzz::manifest(data);
});
