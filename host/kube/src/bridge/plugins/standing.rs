//! When a device plugin registers with a kubelet: once for each `kubelet.sock`, and again where the kubelet lost it. Pure.
//!
//! A kubelet never comes back to a plugin by itself. It forgets one when it restarts (a new `kubelet.sock`), and when the stream of
//! lists ends. Up to 1.36 it takes the end of the stream of an older instance for the end of the newest, so an instance whose stream is
//! gone registers again, but for one that knows of a newer: two of ours never take the name from each other.

use std::time::Duration;

use tokio::time::Instant;

use nodedock_base::backoff::Backoff;
use nodedock_base::device_plugin_sockets::SocketId;
use nodedock_model::limit;

/// What is to be done now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing before something happens.
    Rest,
    /// Nothing before this time.
    Wait(Instant),
    Register,
}

/// How a plugin stands with the kubelet.
#[derive(Debug)]
pub(super) struct Standing {
    registered: Option<SocketId>,
    /// Since when the kubelet follows no list of a registered plugin, or the registration.
    silent: Option<(Instant, Duration)>,
    /// Since when it follows one.
    followed: Option<Instant>,
    /// The socket of the last try in vain, and when to try it again.
    failed: Option<(SocketId, Instant)>,
    failures: Backoff,
    /// Delays after lists that ended.
    losses: Backoff,
    /// Patience with a kubelet that registers the plugin and does not ask for its list.
    patience: Backoff,
}

impl Default for Standing {
    fn default() -> Self {
        Self {
            registered: None,
            silent: None,
            followed: None,
            failed: None,
            failures: Backoff::new(limit::REGISTER_RETRY_MIN, limit::REGISTER_RETRY_MAX),
            losses: Backoff::new(limit::LIST_LOST, limit::REGISTER_RETRY_MAX),
            patience: Backoff::new(limit::LIST_WAIT, limit::REGISTER_RETRY_MAX),
        }
    }
}

impl Standing {
    /// `seen`: the kubelet's socket now; `superseded`: a newer instance of ours offers the resource.
    pub(super) fn step(&self, seen: Option<&SocketId>, superseded: bool, now: Instant) -> Step {
        let Some(seen) = seen else { return Step::Rest };
        let due = if self.registered.as_ref() == Some(seen) {
            match self.silent {
                // The newer one registers again if need be. It may die without a word, so it is looked for from time to time.
                Some(_) if superseded => return Step::Wait(now + limit::LIST_WAIT),
                Some((since, patience)) => since + patience,
                None => return Step::Rest,
            }
        } else {
            now
        };
        let retry = self.failed.as_ref().filter(|(socket, _)| socket == seen).map(|(_, at)| *at);
        let due = retry.map_or(due, |retry| retry.max(due));
        if due <= now { Step::Register } else { Step::Wait(due) }
    }

    pub(super) fn is_registered_at(&self, seen: Option<&SocketId>) -> bool {
        self.registered.is_some() && self.registered.as_ref() == seen
    }

    /// The kubelet behind a socket took the registration; `followed`: it follows a list already.
    pub(super) fn registered(&mut self, socket: SocketId, followed: bool, now: Instant) {
        if self.registered.replace(socket) != Some(socket) {
            self.losses.reset();
            self.patience.reset();
        }
        self.failed = None;
        self.failures.reset();
        // A list that is open may be of the registration before: whether it stays is seen when it ends.
        self.silent = (!followed).then(|| (now, self.patience.delay()));
        self.followed = followed.then_some(now);
    }

    /// The try at a socket failed.
    pub(super) fn failed(&mut self, socket: SocketId, now: Instant) {
        if self.failed.as_ref().is_none_or(|(known, _)| *known != socket) {
            self.failures.reset();
        }
        self.failed = Some((socket, now + self.failures.delay()));
    }

    /// The kubelet follows so many lists.
    pub(super) fn follows(&mut self, lists: usize, now: Instant) {
        if lists > 0 {
            self.silent = None;
            self.patience.reset();
            self.followed.get_or_insert(now);
            return;
        }
        let Some(since) = self.followed.take() else { return };
        if now.duration_since(since) >= limit::LIST_STEADY {
            self.losses.reset();
        }
        self.silent = Some((now, self.losses.delay()));
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use proptest::prelude::*;

    use super::*;

    fn socket(number: u64) -> SocketId {
        SocketId { device: 1, inode: number, made: SystemTime::UNIX_EPOCH + Duration::from_secs(number) }
    }

    fn after(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    #[test]
    fn one_registration_for_each_socket_however_it_was_reached() {
        let (start, mut standing) = (Instant::now(), Standing::default());
        assert_eq!(standing.step(None, false, start), Step::Rest);
        assert_eq!(standing.step(Some(&socket(1)), false, start), Step::Register);
        standing.failed(socket(1), start);
        assert_eq!(standing.step(Some(&socket(1)), false, start), Step::Wait(after(start, 20)));
        // The retry reached the new socket before the watch told of it.
        standing.registered(socket(2), false, after(start, 20));
        standing.follows(1, after(start, 25));
        assert_eq!(standing.step(Some(&socket(2)), false, after(start, 30)), Step::Rest);
        assert_eq!(standing.step(Some(&socket(3)), false, after(start, 30)), Step::Register);
    }

    #[test]
    fn a_new_socket_is_tried_at_once_whatever_the_old_one_cost() {
        let (start, mut standing) = (Instant::now(), Standing::default());
        (0..20).for_each(|_| standing.failed(socket(1), start));
        assert_eq!(
            standing.step(Some(&socket(1)), false, start),
            Step::Wait(start + limit::REGISTER_RETRY_MAX)
        );
        assert_eq!(standing.step(Some(&socket(2)), false, start), Step::Register);
        standing.failed(socket(2), start);
        assert_eq!(
            standing.step(Some(&socket(2)), false, start),
            Step::Wait(start + limit::REGISTER_RETRY_MIN)
        );
    }

    #[test]
    fn a_lost_list_is_sought_again_unless_a_newer_instance_is_there() {
        let (start, mut standing) = (Instant::now(), Standing::default());
        standing.registered(socket(1), false, start);
        assert_eq!(standing.step(Some(&socket(1)), false, start), Step::Wait(start + limit::LIST_WAIT));
        standing.follows(1, start);
        standing.follows(2, start);
        standing.follows(1, start);
        assert_eq!(standing.step(Some(&socket(1)), false, start), Step::Rest);
        standing.follows(0, start);
        assert_eq!(standing.step(Some(&socket(1)), true, start), Step::Wait(start + limit::LIST_WAIT));
        assert_eq!(standing.step(Some(&socket(1)), false, start), Step::Wait(start + limit::LIST_LOST));
        assert_eq!(standing.step(Some(&socket(1)), false, start + limit::LIST_LOST), Step::Register);
        assert_eq!(
            standing.step(Some(&socket(2)), true, start),
            Step::Register,
            "each registers with a new kubelet"
        );
    }

    #[test]
    fn lists_that_do_not_last_are_sought_less_and_less_often() {
        let (mut now, mut standing) = (Instant::now(), Standing::default());
        let mut waits = Vec::new();
        for _ in 0..9 {
            standing.registered(socket(1), false, now);
            standing.follows(1, now);
            standing.follows(0, now);
            let Step::Wait(at) = standing.step(Some(&socket(1)), false, now) else { panic!("no wait") };
            waits.push((at - now).as_secs());
            now = at;
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 120, 120]);
        standing.registered(socket(1), true, now);
        standing.follows(0, now + limit::LIST_STEADY);
        let now = now + limit::LIST_STEADY;
        assert_eq!(standing.step(Some(&socket(1)), false, now), Step::Wait(now + limit::LIST_LOST));
    }

    proptest! {
        /// Against a kubelet that restarts, refuses and drops streams as it likes: a plugin whose list is followed never registers
        /// again at the same socket, and one that is not registered always has a time for its next try.
        #[test]
        fn nothing_is_cut_off_and_nothing_is_forgotten(events in prop::collection::vec((0u8..5, 0u64..20_000), 1..200)) {
            let (mut now, mut standing) = (Instant::now(), Standing::default());
            let (mut kubelet, mut follows) = (1, false);
            let mut registered = None;
            for (event, ms) in events {
                now = after(now, ms);
                match event {
                    0 => { kubelet += 1; follows = false; standing.follows(0, now); }
                    1 => { follows = false; standing.follows(0, now); }
                    2 if registered == Some(kubelet) => { follows = true; standing.follows(1, now); }
                    _ => {}
                }
                let seen = socket(kubelet);
                match standing.step(Some(&seen), false, now) {
                    Step::Register => {
                        prop_assert!(!(follows && registered == Some(kubelet)), "it is followed");
                        if event == 3 {
                            standing.failed(seen, now);
                        } else {
                            standing.registered(seen, false, now);
                            registered = Some(kubelet);
                        }
                    }
                    Step::Wait(at) => prop_assert!(at > now && at <= now + limit::REGISTER_RETRY_MAX),
                    Step::Rest => prop_assert!(follows && registered == Some(kubelet)),
                }
            }
        }
    }
}
