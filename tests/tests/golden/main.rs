//! The same small driver from several languages' tools, by the same list: what an author in any of them can rely on.

mod conformance;
mod helpers;
mod list;
mod new_drivers;
mod swap;

use nodedock_model::grant::Grant;
use nodedock_tests::golden::{self, Bench, C, Golden, JAVASCRIPT, PYTHON, RUST, RUST_WASIP2};
use nodedock_tests::machine::skip;
use nodedock_wasm::WasmDriver;

/// A loaded driver, with nothing granted and with what its author asks for, under the default limits.
struct Loaded {
    golden: Golden,
    bench: Bench,
    denied: WasmDriver,
    driver: WasmDriver,
}

/// None: it is not built, which is said.
async fn load(golden: Golden) -> Option<Loaded> {
    let Some(bytes) = golden.bytes() else {
        skip(
            &format!("the golden driver in {}", golden.language),
            "`cargo xtask golden` did not build it",
        );
        return None;
    };
    let bench = Bench::new(Some(golden::cache()));
    let denied = bench
        .load(&bytes, Grant::empty())
        .await
        .expect("a driver loads with nothing granted");
    let driver = bench
        .load(&bytes, golden::grant())
        .await
        .expect("a driver loads with what it asks for");
    Some(Loaded {
        golden,
        bench,
        denied,
        driver,
    })
}

async fn holds_to_the_list(golden: Golden) {
    if let Some(loaded) = load(golden).await {
        list::run(&loaded).await;
    }
}

#[tokio::test]
async fn rust_core_module_matches_golden_list() {
    holds_to_the_list(RUST).await;
}

#[tokio::test]
async fn rust_wasi_component_matches_golden_list() {
    holds_to_the_list(RUST_WASIP2).await;
}

#[tokio::test]
async fn c_holds_to_the_list() {
    holds_to_the_list(C).await;
}

#[tokio::test]
async fn python_holds_to_the_list() {
    holds_to_the_list(PYTHON).await;
}

#[tokio::test]
async fn javascript_holds_to_the_list() {
    holds_to_the_list(JAVASCRIPT).await;
}
