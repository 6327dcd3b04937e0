//! A signal that something changed, without what: listeners read the state itself.
//!
//! Signals that come without a listener, or faster than a listener reads, count as one.

use tokio::sync::watch;

use crate::woken;

/// The sender of a signal. It needs no listener.
#[derive(Debug, Default)]
pub struct Signal(watch::Sender<()>);

/// A listener of a signal. A signal that was sent before it was made does not count.
#[derive(Debug, Clone)]
pub struct Listener(watch::Receiver<()>);

/// The sender of the signal is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the sender of the signal is gone")]
pub struct SenderGone;

impl Signal {
    pub fn new() -> Self {
        Self::default()
    }

    /// Wakes every listener.
    pub fn send(&self) {
        if self.0.receiver_count() > 0 {
            woken::note();
        }
        self.0.send_replace(());
    }

    pub fn subscribe(&self) -> Listener {
        Listener(self.0.subscribe())
    }
}

impl Listener {
    /// Resolves when the signal was sent since the last call of this or of `mark_unchanged`; at once if it was already. Cancel safe.
    ///
    /// # Errors
    ///
    /// If the sender is gone, after the last signal.
    pub async fn changed(&mut self) -> Result<(), SenderGone> {
        self.0.changed().await.map_err(|_| SenderGone)
    }

    /// Ignores the signals until now: the caller is about to read the state.
    pub fn mark_unchanged(&mut self) {
        self.0.mark_unchanged();
    }

    /// Returns whether the signal was sent since it was last seen.
    ///
    /// # Errors
    ///
    /// The sender is gone.
    pub fn has_changed(&self) -> Result<bool, SenderGone> {
        self.0.has_changed().map_err(|_| SenderGone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn unread_signals_count_once() {
        let signal = Signal::new();
        signal.send();
        let mut listener = signal.subscribe();
        assert_eq!(listener.has_changed(), Ok(false), "sent before it listened");
        signal.send();
        signal.send();
        assert_eq!(listener.has_changed(), Ok(true));
        assert_eq!(listener.changed().await, Ok(()));
        assert_eq!(listener.has_changed(), Ok(false));
        assert!(futures::poll!(Box::pin(listener.changed())).is_pending());
    }

    #[tokio::test]
    async fn marked_signals_do_not_wake() {
        let signal = Signal::new();
        let mut listener = signal.subscribe();
        signal.send();
        listener.mark_unchanged();
        assert_eq!(listener.has_changed(), Ok(false));
        signal.send();
        assert_eq!(listener.changed().await, Ok(()));
    }

    #[tokio::test]
    async fn dropped_sender_ends_listeners() {
        let signal = Signal::new();
        let mut listener = signal.subscribe();
        signal.send();
        drop(signal);
        assert_eq!(listener.changed().await, Ok(()));
        assert_eq!(listener.changed().await, Err(SenderGone));
    }

    #[tokio::test]
    async fn every_listener_is_woken() {
        let signal = Signal::new();
        let (mut one, mut two) = (signal.subscribe(), signal.subscribe());
        signal.send();
        assert_eq!((one.changed().await, two.changed().await), (Ok(()), Ok(())));
    }
}
