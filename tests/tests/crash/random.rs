//! The seed of random numbers that a run can repeat.

use std::hash::{BuildHasher, RandomState};

/// Repeats a run, as far as time lets it.
const SEED: &str = "NODEDOCK_TEST_SEED";

/// The seed of the environment, else a new one.
pub(crate) fn seed() -> u64 {
    match std::env::var(SEED) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|error| panic!("{SEED}={text:?}: {error}")),
        Err(_) => RandomState::new().hash_one(()),
    }
}

/// Describes how to reproduce the same numbers.
pub(crate) fn explain(seed: u64) -> String {
    format!("{SEED}={seed}")
}
