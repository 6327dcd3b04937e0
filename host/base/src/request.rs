//! Request ids for operations without one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

/// Distinguishes this run of the daemon from others in the logs of drivers.
static RUN: LazyLock<String> =
    LazyLock::new(|| uuid::Uuid::new_v4().simple().to_string()[..8].to_owned());
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Returns a request id: unique in this run, and almost unique beyond it by eight random digits. Needs no system call.
pub fn new_id() -> Arc<str> {
    format!("{}-{}", *RUN, NEXT.fetch_add(1, Ordering::Relaxed)).into()
}

#[cfg(test)]
mod tests {
    #[test]
    fn ids_differ_and_share_the_run() {
        let (one, two) = (super::new_id(), super::new_id());
        assert_ne!(one, two);
        assert_eq!(one.split('-').next(), two.split('-').next());
    }
}
