#![no_main]

use std::panic::{catch_unwind, set_hook};
use std::process::abort;
use std::sync::Once;

/// The host catches panics of the WIT parser, and libFuzzer's hook would end the process before that. Uncaught panics still end it.
static QUIET: Once = Once::new();

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    QUIET.call_once(|| set_hook(Box::new(|_| {})));
    if let Err(panic) = catch_unwind(|| nodedockd::testing::fuzz::admission(data)) {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        eprintln!("{}", text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a text"));
        abort();
    }
});
