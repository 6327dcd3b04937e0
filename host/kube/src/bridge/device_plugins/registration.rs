//! Timing of a device plugin's registrations with a kubelet: once for each `kubelet.sock`, and again after the kubelet lost the plugin.
//! Pure.
//!
//! A kubelet never dials a plugin by itself. It forgets a plugin when it restarts (a new `kubelet.sock`), and when the stream of lists
//! ends. Up to 1.36 it takes the end of an older instance's stream for the end of the newest, so an instance that takes over registers only
//! when the previous instance has ended its stream.

use std::time::Duration;
use tokio::time::Instant;

use crate::bridge::device_plugins::LIST_LOST;
use nodedock_base::backoff::Backoff;
use nodedock_base::device_plugin_sockets::SocketId;
use nodedock_model::limit;

/// Age after which the end of a list does not count as a failure.
const LIST_STEADY: Duration = Duration::from_secs(60);

/// A kubelet that registered a device plugin opens its list at once; one that does not within this time has lost the plugin.
const LIST_WAIT: Duration = Duration::from_secs(10);

/// Time without a successful registration with a kubelet after which it is reported. A kubelet restarts in less.
pub(crate) const KUBELET_AWAY: Duration = Duration::from_secs(30);

/// State of a resource's registration with the kubelet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PluginRegistration {
    /// Not registered, or the kubelet has no list open; why.
    Waiting(String),
    /// The kubelet's message.
    Refused(String),
    /// Registered, and the kubelet has a list open.
    Followed,
}

impl Default for PluginRegistration {
    fn default() -> Self {
        Self::Waiting(NOT_TRIED.to_owned())
    }
}

impl PluginRegistration {
    /// Returns whether the kubelet has accepted or refused it.
    pub fn is_settled(&self) -> bool {
        !matches!(self, Self::Waiting(_))
    }
}

const NOT_TRIED: &str = "it has not been tried yet";

/// A plugin's registrations with the kubelet so far.
#[derive(Debug)]
pub(super) struct RegistrationState {
    registered: Option<SocketId>,
    /// Time of the next registration, while the kubelet has no list of a registered plugin open.
    unlisted: Option<Instant>,
    /// Time since which the kubelet has a list open.
    listed: Option<Instant>,
    /// The socket of the last attempt that failed, and when to retry it.
    failed: Option<(SocketId, Instant)>,
    pub(super) status: PluginRegistration,
    /// Time since which the status is `Waiting`, or refused after that.
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
            unlisted: None,
            listed: None,
            failed: None,
            status: PluginRegistration::default(),
            waiting_since: None,
            failures: Backoff::new(limit::REGISTER_RETRY_MIN, limit::REGISTER_RETRY_MAX),
            losses: Backoff::new(LIST_LOST, limit::REGISTER_RETRY_MAX),
            patience: Backoff::new(LIST_WAIT, limit::REGISTER_RETRY_MAX),
        }
    }
}

impl RegistrationState {
    /// Returns the time at which to register, which may be now or in the past; None: not before the next event. `kubelet` is its current
    /// socket.
    pub(super) fn due(&self, kubelet: Option<SocketId>, now: Instant) -> Option<Instant> {
        let kubelet = kubelet?;
        let mut due = now;
        if self.is_registered_at(Some(kubelet)) {
            due = self.unlisted?;
        }
        match self.failed {
            Some((socket, retry)) if socket == kubelet => Some(due.max(retry)),
            _ => Some(due),
        }
    }

    /// The plugin has to register again.
    pub(super) fn forget(&mut self) {
        self.registered = None;
    }

    pub(super) fn is_registered_at(&self, kubelet: Option<SocketId>) -> bool {
        self.registered.is_some() && self.registered == kubelet
    }

    /// Returns the time at which a plugin that no kubelet has registered becomes a condition.
    pub(super) fn away_at(&self) -> Option<Instant> {
        let is_waiting = matches!(self.status, PluginRegistration::Waiting(_));
        self.waiting_since
            .filter(|_| is_waiting)
            .map(|since| since + KUBELET_AWAY)
    }

    /// Takes what is there: the kubelet's socket, and how many lists it has open.
    pub(super) fn observe(&mut self, kubelet: Option<SocketId>, lists: usize, now: Instant) {
        self.observe_lists(lists, now);
        if lists > 0 {
            (self.status, self.waiting_since) = (PluginRegistration::Followed, None);
            return;
        }
        let why = match &self.status {
            _ if kubelet.is_none() => "it is not there".to_owned(),
            PluginRegistration::Refused(_) => return,
            PluginRegistration::Waiting(why) => why.clone(),
            PluginRegistration::Followed => NOT_TRIED.to_owned(),
        };
        self.status = PluginRegistration::Waiting(why);
        self.waiting_since.get_or_insert(now);
    }

    fn observe_lists(&mut self, lists: usize, now: Instant) {
        if lists > 0 {
            self.unlisted = None;
            self.patience.reset();
            self.listed.get_or_insert(now);
            return;
        }
        let Some(since) = self.listed.take() else {
            return;
        };
        if now.duration_since(since) >= LIST_STEADY {
            self.losses.reset();
        }
        self.unlisted = Some(now + self.losses.delay());
    }

    /// The kubelet behind a socket took the registration; `is_listed`: it has a list open already.
    pub(super) fn registered(&mut self, socket: SocketId, is_listed: bool, now: Instant) {
        if self.registered.replace(socket) != Some(socket) {
            self.losses.reset();
            self.patience.reset();
        }
        self.failed = None;
        self.failures.reset();
        // A list that is open may be of the registration before: whether it stays is seen when it ends.
        self.unlisted = (!is_listed).then(|| now + self.patience.delay());
        self.listed = is_listed.then_some(now);
        self.status =
            PluginRegistration::Waiting("it does not ask for the list of devices".to_owned());
        self.waiting_since = Some(now);
    }

    /// The attempt at a socket, if one was there, failed or was refused.
    pub(super) fn failed(
        &mut self,
        socket: Option<SocketId>,
        status: PluginRegistration,
        now: Instant,
    ) {
        if let Some(socket) = socket {
            if self
                .failed
                .as_ref()
                .is_none_or(|(known, _)| *known != socket)
            {
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
    use std::time::{Duration, SystemTime};

    use proptest::prelude::*;

    use super::*;

    const NOW: Option<Duration> = Some(Duration::ZERO);

    /// A plugin, and the time.
    struct Scene {
        state: RegistrationState,
        now: Instant,
    }

    fn socket(number: u64) -> SocketId {
        SocketId {
            device: 1,
            inode: number,
            made: SystemTime::UNIX_EPOCH + Duration::from_secs(number),
        }
    }

    impl Scene {
        fn new() -> Self {
            Self {
                state: RegistrationState::default(),
                now: Instant::now(),
            }
        }

        /// Returns the time until it registers at a socket.
        fn wait(&self, number: u64) -> Option<Duration> {
            let due = self.state.due(Some(socket(number)), self.now);
            due.map(|at| at.saturating_duration_since(self.now))
        }

        fn registered(&mut self, number: u64) {
            self.state.registered(socket(number), false, self.now);
        }

        fn failed(&mut self, number: u64) {
            let why = PluginRegistration::Waiting("of the test".to_owned());
            self.state.failed(Some(socket(number)), why, self.now);
        }

        fn lists(&mut self, number: u64, lists: usize) {
            self.state.observe(Some(socket(number)), lists, self.now);
        }
    }

    #[test]
    fn each_kubelet_socket_is_registered_once() {
        let mut scene = Scene::new();
        assert_eq!(scene.state.due(None, scene.now), None);
        assert_eq!(scene.wait(1), NOW);
        scene.failed(1);
        assert_eq!(scene.wait(1), Some(limit::REGISTER_RETRY_MIN));
        (0..20).for_each(|_| scene.failed(1));
        assert_eq!(
            (scene.wait(1), scene.wait(2)),
            (Some(limit::REGISTER_RETRY_MAX), NOW)
        );
        scene.failed(2);
        assert_eq!(scene.wait(2), Some(limit::REGISTER_RETRY_MIN));
        // The retry reached the new socket before the watch reported it.
        scene.registered(3);
        scene.lists(3, 1);
        assert_eq!((scene.wait(3), scene.wait(4)), (None, NOW));
    }

    #[test]
    fn a_lost_list_is_registered_again() {
        let mut scene = Scene::new();
        scene.registered(1);
        assert_eq!(scene.wait(1), Some(LIST_WAIT));
        for (lists, expected) in [(1, None), (2, None), (1, None), (0, Some(LIST_LOST))] {
            scene.lists(1, lists);
            assert_eq!(scene.wait(1), expected);
        }
        assert_eq!(scene.wait(2), NOW, "each registers with a new kubelet");
        scene.now += LIST_LOST;
        assert_eq!(scene.wait(1), NOW);
    }

    #[test]
    fn short_lived_lists_back_off_registration() {
        let mut scene = Scene::new();
        let mut waits = Vec::new();
        for _ in 0..9 {
            scene.registered(1);
            scene.lists(1, 1);
            scene.lists(1, 0);
            let wait = scene.wait(1).unwrap();
            waits.push(wait.as_secs());
            scene.now += wait;
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 120, 120]);
        scene.state.registered(socket(1), true, scene.now);
        scene.now += LIST_STEADY;
        scene.lists(1, 0);
        assert_eq!(scene.wait(1), Some(LIST_LOST));
    }

    #[test]
    fn registration_refusal_lasts_until_accepted() {
        let mut scene = Scene::new();
        let observed = |scene: &mut Scene, kubelet: Option<u64>, lists| {
            scene.now += Duration::from_secs(1);
            scene.state.observe(kubelet.map(socket), lists, scene.now);
            let away = scene.state.away_at().map(|at| (at - scene.now).as_secs());
            (scene.state.status.clone(), away)
        };
        let max = KUBELET_AWAY.as_secs();
        assert_eq!(observed(&mut scene, Some(1), 0).1, Some(max));
        let refused = PluginRegistration::Refused("no".to_owned());
        scene
            .state
            .failed(Some(socket(1)), refused.clone(), scene.now);
        assert_eq!(observed(&mut scene, Some(1), 0), (refused, None));
        let (status, away) = observed(&mut scene, None, 0);
        assert!(
            !status.is_settled() && away == Some(max - 2),
            "since the start"
        );
        scene.registered(2);
        assert_eq!(scene.state.away_at(), Some(scene.now + KUBELET_AWAY));
        assert_eq!(
            observed(&mut scene, Some(2), 1),
            (PluginRegistration::Followed, None)
        );
        assert_eq!(observed(&mut scene, Some(2), 0).1, Some(max));
    }

    proptest! {
        /// Checks the behaviour with a kubelet that restarts, refuses and drops streams at any time: a plugin with an open list never
        /// registers again at the same socket, and one that is not registered always has a time for its next try.
        #[test]
        fn open_list_is_never_registered_again(events in prop::collection::vec((0u8..5, 0u64..20_000), 1..200)) {
            let (mut scene, mut kubelet, mut is_listed, mut registered) = (Scene::new(), 1, false, None);
            for (event, ms) in events {
                scene.now += Duration::from_millis(ms);
                match event {
                    0 => { kubelet += 1; is_listed = false; scene.lists(kubelet, 0); }
                    1 => { is_listed = false; scene.lists(kubelet, 0); }
                    2 if registered == Some(kubelet) => { is_listed = true; scene.lists(kubelet, 1); }
                    _ => {}
                }
                match scene.wait(kubelet) {
                    Some(wait) if wait.is_zero() => {
                        prop_assert!(!(is_listed && registered == Some(kubelet)), "its list is open");
                        if event == 3 {
                            scene.failed(kubelet);
                        } else {
                            scene.registered(kubelet);
                            registered = Some(kubelet);
                        }
                    }
                    Some(wait) => prop_assert!(wait <= limit::REGISTER_RETRY_MAX),
                    None => prop_assert!(is_listed && registered == Some(kubelet)),
                }
            }
        }
    }
}
