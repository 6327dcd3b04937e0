//! The channel that publishes changes. It needs no listener.
//!
//! A listener gets each change (`listen`), and loses the oldest if it is slow; or it gets a signal of the changes of one kind
//! (`signal_of`), which count as one until it looks. A change wakes no listener of another kind.

use std::sync::Arc;

use tokio::sync::broadcast;

use crate::clock::now_ms;
use crate::signal::{Listener, Signal};
use crate::woken;
use nodedock_model::{Changed, ChangedKind};

/// Number of changes that a listener may lag before it is notified of a loss.
const CHANGES_BEHIND_MAX: usize = 1024;

#[derive(Clone)]
pub struct Changes(Arc<Channels>);

struct Channels {
    all: broadcast::Sender<Changed>,
    drivers: Signal,
    devices: Signal,
    claims: Signal,
    node: Signal,
}

impl Default for Changes {
    fn default() -> Self {
        Self(Arc::new(Channels {
            all: broadcast::channel(CHANGES_BEHIND_MAX).0,
            drivers: Signal::new(),
            devices: Signal::new(),
            claims: Signal::new(),
            node: Signal::new(),
        }))
    }
}

impl Changes {
    pub fn report(&self, kind: ChangedKind, name: impl ToString, state: &str) {
        self.signal(kind).send();
        if self.0.all.receiver_count() == 0 {
            return;
        }
        let changed = Changed {
            kind,
            name: name.to_string(),
            state: state.to_owned(),
            at_ms: now_ms(),
        };
        woken::note();
        // A channel without listeners is no error.
        let _ = self.0.all.send(changed);
    }

    /// Returns a receiver of each change.
    pub fn listen(&self) -> broadcast::Receiver<Changed> {
        self.0.all.subscribe()
    }

    /// Returns a listener that is signalled when something of a kind changed.
    pub fn signal_of(&self, kind: ChangedKind) -> Listener {
        self.signal(kind).subscribe()
    }

    fn signal(&self, kind: ChangedKind) -> &Signal {
        match kind {
            ChangedKind::Driver => &self.0.drivers,
            ChangedKind::Device => &self.0.devices,
            ChangedKind::Claim => &self.0.claims,
            ChangedKind::Node => &self.0.node,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_is_of_one_kind() {
        let changes = Changes::default();
        let mut all = changes.listen();
        let [claims, drivers] =
            [ChangedKind::Claim, ChangedKind::Driver].map(|kind| changes.signal_of(kind));
        for state in ["preparing", "prepared"] {
            changes.report(ChangedKind::Claim, "default/a", state);
        }
        assert_eq!(
            (claims.has_changed(), drivers.has_changed()),
            (Ok(true), Ok(false))
        );
        let states = std::iter::from_fn(|| all.try_recv().ok()).map(|changed| changed.state);
        assert_eq!(states.collect::<Vec<_>>(), ["preparing", "prepared"]);
        changes.report(ChangedKind::Driver, "a.dev", "serving");
        assert_eq!(drivers.has_changed(), Ok(true));
    }
}
