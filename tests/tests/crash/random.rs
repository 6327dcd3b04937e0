//! Random numbers that can be had again.

use std::hash::{BuildHasher, RandomState};

/// Repeats a run, as far as time lets it.
const SEED: &str = "NODEDOCK_TEST_SEED";

/// SplitMix64.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

/// The seed of the environment, else a new one.
pub(crate) fn seed() -> u64 {
    match std::env::var(SEED) {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("{SEED}={text:?}: {error}")),
        Err(_) => RandomState::new().hash_one(()),
    }
}

/// How to have the same numbers again.
pub(crate) fn explain(seed: u64) -> String {
    format!("{SEED}={seed}")
}

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// One that goes its own way.
    pub(crate) fn fork(&mut self) -> Self {
        Self(self.next())
    }

    /// From 0, below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}
