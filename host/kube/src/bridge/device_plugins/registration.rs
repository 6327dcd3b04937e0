//! When a device plugin registers with a kubelet: once for each `kubelet.sock`, and again where the kubelet lost it. Pure.
//!
//! A kubelet never comes back to a plugin by itself. It forgets one when it restarts (a new `kubelet.sock`), and when the stream of
//! lists ends. Up to 1.36 it takes the end of the stream of an older instance for the end of the newest, so an instance whose stream is
//! gone registers again, unless it knows of a newer one: two instances never take the name from each other.

use std::time::Duration;

use tokio::time::Instant;

use nodedock_base::backoff::Backoff;
use nodedock_base::device_plugin_sockets::SocketId;
use nodedock_model::limit;

/// Whether a resource is registered with the kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PluginRegistration {
    /// Not registered, or the kubelet does not follow the list; why.
    Waiting(String),
    /// The kubelet's message.
    Refused(String),
    /// Registered, and the kubelet follows the list.
    Followed,
    /// A newer instance of this daemon offers the resource.
    Superseded,
}

impl Default for PluginRegistration {
    fn default() -> Self {
        Self::Waiting(NOT_TRIED.to_owned())
    }
}

impl PluginRegistration {
    /// Whether the kubelet has decided about it.
    pub fn is_settled(&self) -> bool {
        !matches!(self, Self::Waiting(_))
    }
}

const NOT_TRIED: &str = "it has not been tried yet";

/// What is to be done now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing before something happens.
    Rest,
    /// Nothing before this time.
    Wait(Instant),
    Register,
}

/// A plugin's registrations with the kubelet so far.
#[derive(Debug)]
pub(super) struct RegistrationState {
    registered: Option<SocketId>,
    /// Since when the kubelet follows no list of a registered plugin, or the registration, and for how long that is waited for.
    silent: Option<(Instant, Duration)>,
    /// Since when it follows one.
    followed: Option<Instant>,
    /// The socket of the last attempt that failed, and when to retry it.
    failed: Option<(SocketId, Instant)>,
    status: PluginRegistration,
    /// Since when the status is `Waiting`, or refused after that.
    waiting_since: Option<Instant>,
    failures: Backoff,
    /// Delays after lists that ended.
    losses: Backoff,
    /// Patience with a kubelet that registers the plugin and does not ask for its list.
    patience: Backoff,
}

impl Default for RegistrationState {
    fn default() -> Self {
        Self {
            registered: None,
            silent: None,
            followed: None,
            failed: None,
            status: PluginRegistration::default(),
            waiting_since: None,
            failures: Backoff::new(limit::REGISTER_RETRY_MIN, limit::REGISTER_RETRY_MAX),
            losses: Backoff::new(limit::LIST_LOST, limit::REGISTER_RETRY_MAX),
            patience: Backoff::new(limit::LIST_WAIT, limit::REGISTER_RETRY_MAX),
        }
    }
}

impl RegistrationState {
    /// `kubelet`: its socket now; `superseded`: a newer instance offers the resource.
    pub(super) fn step(&self, kubelet: Option<&SocketId>, superseded: bool, now: Instant) -> Step {
        let Some(kubelet) = kubelet else { return Step::Rest };
        let due = if self.registered.as_ref() == Some(kubelet) {
            match self.silent {
                // The newer instance registers again if need be. It may die without notice, so it is checked from time to time.
                Some(_) if superseded => return Step::Wait(now + limit::LIST_WAIT),
                Some((since, patience)) => since + patience,
                None => return Step::Rest,
            }
        } else {
            now
        };
        let retry = self.failed.as_ref().filter(|(socket, _)| socket == kubelet).map(|(_, at)| *at);
        let due = retry.map_or(due, |retry| retry.max(due));
        if due <= now { Step::Register } else { Step::Wait(due) }
    }

    pub(super) fn is_registered_at(&self, kubelet: Option<&SocketId>) -> bool {
        self.registered.is_some() && self.registered.as_ref() == kubelet
    }

    pub(super) fn status(&self) -> &PluginRegistration {
        &self.status
    }

    /// When no kubelet took the plugin for so long that it is a condition.
    pub(super) fn away_at(&self) -> Option<Instant> {
        let is_waiting = matches!(self.status, PluginRegistration::Waiting(_));
        self.waiting_since.filter(|_| is_waiting).map(|since| since + limit::KUBELET_AWAY)
    }

    /// Takes what is there: the kubelet's socket, how many lists it follows, and whether a newer instance offers the resource.
    pub(super) fn observe(
        &mut self,
        kubelet: Option<&SocketId>,
        lists: usize,
        superseded: bool,
        now: Instant,
    ) {
        let settled = match (lists > 0, superseded) {
            (true, _) => Some(PluginRegistration::Followed),
            (false, true) => Some(PluginRegistration::Superseded),
            (false, false) => None,
        };
        if let Some(status) = settled {
            (self.status, self.waiting_since) = (status, None);
            return;
        }
        let why = match &self.status {
            _ if kubelet.is_none() => "it is not there".to_owned(),
            PluginRegistration::Refused(_) => return,
            PluginRegistration::Waiting(why) => why.clone(),
            PluginRegistration::Followed | PluginRegistration::Superseded => NOT_TRIED.to_owned(),
        };
        self.status = PluginRegistration::Waiting(why);
        self.waiting_since.get_or_insert(now);
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
        self.status = PluginRegistration::Waiting("it does not ask for the list of devices".to_owned());
        self.waiting_since = Some(now);
    }

    /// The attempt at a socket, if one was there, failed or was refused.
    pub(super) fn failed(&mut self, socket: Option<SocketId>, status: PluginRegistration, now: Instant) {
        if let Some(socket) = socket {
            if self.failed.as_ref().is_none_or(|(known, _)| *known != socket) {
                self.failures.reset();
            }
            self.failed = Some((socket, now + self.failures.delay()));
        }
        self.status = status;
        self.waiting_since.get_or_insert(now);
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

    fn waiting() -> PluginRegistration {
        PluginRegistration::Waiting("of the test".to_owned())
    }

    fn after(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    #[test]
    fn one_registration_for_each_socket_however_it_was_reached() {
        let (start, mut state) = (Instant::now(), RegistrationState::default());
        assert_eq!(state.step(None, false, start), Step::Rest);
        assert_eq!(state.step(Some(&socket(1)), false, start), Step::Register);
        state.failed(Some(socket(1)), waiting(), start);
        assert_eq!(state.step(Some(&socket(1)), false, start), Step::Wait(after(start, 20)));
        // The retry reached the new socket before the watch reported it.
        state.registered(socket(2), false, after(start, 20));
        state.follows(1, after(start, 25));
        assert_eq!(state.step(Some(&socket(2)), false, after(start, 30)), Step::Rest);
        assert_eq!(state.step(Some(&socket(3)), false, after(start, 30)), Step::Register);
    }

    #[test]
    fn a_new_socket_is_tried_at_once_whatever_the_old_one_cost() {
        let (start, mut state) = (Instant::now(), RegistrationState::default());
        (0..20).for_each(|_| state.failed(Some(socket(1)), waiting(), start));
        assert_eq!(state.step(Some(&socket(1)), false, start), Step::Wait(start + limit::REGISTER_RETRY_MAX));
        assert_eq!(state.step(Some(&socket(2)), false, start), Step::Register);
        state.failed(Some(socket(2)), waiting(), start);
        assert_eq!(state.step(Some(&socket(2)), false, start), Step::Wait(start + limit::REGISTER_RETRY_MIN));
    }

    #[test]
    fn a_lost_list_is_registered_again_unless_a_newer_instance_is_there() {
        let (start, mut state) = (Instant::now(), RegistrationState::default());
        state.registered(socket(1), false, start);
        assert_eq!(state.step(Some(&socket(1)), false, start), Step::Wait(start + limit::LIST_WAIT));
        state.follows(1, start);
        state.follows(2, start);
        state.follows(1, start);
        assert_eq!(state.step(Some(&socket(1)), false, start), Step::Rest);
        state.follows(0, start);
        assert_eq!(state.step(Some(&socket(1)), true, start), Step::Wait(start + limit::LIST_WAIT));
        assert_eq!(state.step(Some(&socket(1)), false, start), Step::Wait(start + limit::LIST_LOST));
        assert_eq!(state.step(Some(&socket(1)), false, start + limit::LIST_LOST), Step::Register);
        assert_eq!(
            state.step(Some(&socket(2)), true, start),
            Step::Register,
            "each registers with a new kubelet"
        );
    }

    #[test]
    fn lists_that_do_not_last_are_registered_again_less_and_less_often() {
        let (mut now, mut state) = (Instant::now(), RegistrationState::default());
        let mut waits = Vec::new();
        for _ in 0..9 {
            state.registered(socket(1), false, now);
            state.follows(1, now);
            state.follows(0, now);
            let Step::Wait(at) = state.step(Some(&socket(1)), false, now) else { panic!("no wait") };
            waits.push((at - now).as_secs());
            now = at;
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 120, 120]);
        state.registered(socket(1), true, now);
        state.follows(0, now + limit::LIST_STEADY);
        let now = now + limit::LIST_STEADY;
        assert_eq!(state.step(Some(&socket(1)), false, now), Step::Wait(now + limit::LIST_LOST));
    }

    #[test]
    fn a_refusal_is_shown_until_it_is_lifted_and_waiting_begins_when_the_list_is_lost() {
        let (start, mut state) = (Instant::now(), RegistrationState::default());
        state.observe(Some(&socket(1)), 0, false, start);
        assert_eq!(state.away_at(), Some(start + limit::KUBELET_AWAY));
        let refused = PluginRegistration::Refused("no".to_owned());
        state.failed(Some(socket(1)), refused.clone(), start);
        state.observe(Some(&socket(1)), 0, false, after(start, 10));
        assert_eq!((state.status(), state.away_at()), (&refused, None));
        state.observe(None, 0, false, after(start, 20));
        assert!(!state.status().is_settled() && state.away_at() == Some(start + limit::KUBELET_AWAY));
        state.registered(socket(2), false, after(start, 30));
        assert_eq!(state.away_at(), Some(after(start, 30) + limit::KUBELET_AWAY));
        state.observe(Some(&socket(2)), 1, false, after(start, 40));
        assert_eq!((state.status(), state.away_at()), (&PluginRegistration::Followed, None));
        state.observe(Some(&socket(2)), 0, true, after(start, 50));
        assert_eq!((state.status(), state.away_at()), (&PluginRegistration::Superseded, None));
        state.observe(Some(&socket(2)), 0, false, after(start, 60));
        assert_eq!(state.away_at(), Some(after(start, 60) + limit::KUBELET_AWAY));
    }

    proptest! {
        /// Against a kubelet that restarts, refuses and drops streams as it likes: a plugin whose list is followed never registers
        /// again at the same socket, and one that is not registered always has a time for its next try.
        #[test]
        fn nothing_is_cut_off_and_nothing_is_forgotten(events in prop::collection::vec((0u8..5, 0u64..20_000), 1..200)) {
            let (mut now, mut state) = (Instant::now(), RegistrationState::default());
            let (mut kubelet, mut follows) = (1, false);
            let mut registered = None;
            for (event, ms) in events {
                now = after(now, ms);
                match event {
                    0 => { kubelet += 1; follows = false; state.follows(0, now); }
                    1 => { follows = false; state.follows(0, now); }
                    2 if registered == Some(kubelet) => { follows = true; state.follows(1, now); }
                    _ => {}
                }
                let seen = socket(kubelet);
                match state.step(Some(&seen), false, now) {
                    Step::Register => {
                        prop_assert!(!(follows && registered == Some(kubelet)), "it is followed");
                        if event == 3 {
                            state.failed(Some(seen), waiting(), now);
                        } else {
                            state.registered(seen, false, now);
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
