//! Lets a kubelet's calls through until the place is handed over: then each is told to come again, and finds the next instance.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nodedock_model::Problem;

/// What a call meets while no instance serves.
pub(super) const HANDING_OVER: &str = "handing-over";
/// A start takes about so long.
const COME_AGAIN: Duration = Duration::from_secs(2);

#[derive(Clone, Default)]
pub(in crate::app) struct Gate(Arc<AtomicBool>);

impl Gate {
    pub(in crate::app) fn close(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(super) fn pass(&self) -> Result<(), Problem> {
        match self.0.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(Problem::unavailable(
                HANDING_OVER,
                "the daemon stops, or a newer instance takes over just now",
            )
            .retry_after(COME_AGAIN)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_after_the_close_is_told_to_come_again() {
        let gate = Gate::default();
        assert_eq!(gate.pass(), Ok(()));
        gate.clone().close();
        let problem = gate.pass().unwrap_err();
        assert!(problem.code == HANDING_OVER && problem.retry_after_ms.is_some());
    }
}
