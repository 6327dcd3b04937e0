//! The sources of drivers, each a file or a socket, with the state that is shown of it.
//!
//! Given each change of a source, it reports the change, sets conditions of the node while the source does not serve and while its driver leaves out
//! devices, and returns views.
//! Knows no driver.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use parking_lot::RwLock;

use crate::driver::DriverIdentity;
use crate::left_out;
use nodedock_base::changes::Changes;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_base::worded;
use nodedock_model::{
    ChangedKind, DriverKind, DriverName, HealthReport, LeftOut, Problem, ProblemCode, Transition,
    limit,
};

worded! {
    /// State of a driver.
    #[derive(Default)]
    DriverState {
        #[default]
        Seen = "seen",
        Verified = "verified",
        Compiled = "compiled",
        Described = "described",
        /// It requests more than its grant.
        Blocked = "blocked",
        Serving = "serving",
        /// A native plugin without a connection; its registration stays.
        Lost = "lost",
        Draining = "draining",
        Failed = "failed",
        /// A WASM driver whose calls failed repeatedly: it is not called until a probe succeeds.
        Quarantined = "quarantined",
    }
}

impl DriverState {
    /// Returns whether the state is transient: the driver is about to serve or to fail.
    pub fn is_under_way(self) -> bool {
        matches!(
            self,
            Self::Seen | Self::Verified | Self::Compiled | Self::Described
        )
    }
}

/// A source of a driver and its state.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DriverView {
    /// `None` while it is unknown.
    pub name: Option<DriverName>,
    pub kind: DriverKind,
    /// Name of the file, or path of the socket.
    pub source: String,
    pub version: String,
    pub state: DriverState,
    /// Why it does not serve, or a defect although it serves.
    pub reason: String,
    pub digest: String,
    pub summary: String,
    pub devices: usize,
    /// Devices that the driver sees and does not offer.
    pub left_out: LeftOut,
    pub missing_grants: Vec<String>,
    /// Properties of the parameters in claims and classes, in one line; `None` for a driver without their schema.
    pub parameters: Option<String>,
    /// Time of the last discovery; Unix milliseconds.
    pub discovered_ms: Option<u64>,
    pub problem: Option<Problem>,
    /// The newest last.
    pub timeline: VecDeque<Transition>,
    /// View of a registered native plugin.
    pub native: Option<NativeView>,
    /// Verdict of the trust policy, for a file.
    pub trust: Option<TrustView>,
}

/// Verdict of the trust policy on a driver's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustView {
    /// off, warn or enforce.
    pub mode: &'static str,
    /// trusted, distrusted, or unchecked if the policy is off.
    pub verdict: &'static str,
    /// Name of the key that signed the file, in the config.
    pub key: Option<String>,
    /// The driver name or file stem under which the file's digest is pinned.
    pub pin: Option<String>,
    /// Why it is not trusted.
    pub reason: Option<String>,
}

/// Data of a native plugin that other drivers do not have.
#[derive(Debug, Clone, PartialEq)]
pub struct NativeView {
    pub endpoint: String,
    /// Services in the plugin's registration.
    pub services: Vec<String>,
    /// connecting, connected, lost or closed.
    pub connection: &'static str,
    /// Current health.
    pub health: HealthReport,
}

impl DriverView {
    fn new(kind: DriverKind, source: &str) -> Self {
        Self {
            kind,
            source: source.to_owned(),
            ..Self::default()
        }
    }

    /// The driver's name, or the source where that is unknown.
    pub(super) fn called(&self) -> &str {
        self.name.as_ref().map_or(&self.source, DriverName::as_str)
    }

    fn is_named(&self, name: &str) -> bool {
        self.name
            .as_ref()
            .is_some_and(|known| known.as_str() == name)
    }

    pub fn note(&mut self, what: &str, cause: &str, duration_us: u64, problem: Option<Problem>) {
        while self.timeline.len() >= limit::TIMELINE_MAX {
            self.timeline.pop_front();
        }
        let (what, cause) = (what.to_owned(), cause.to_owned());
        let transition = Transition {
            at_ms: now_ms(),
            what,
            cause,
            duration_us,
            problem,
            again: None,
        };
        self.timeline.push_back(transition);
    }
}

/// The owner of the sources.
pub struct Sources {
    views: RwLock<BTreeMap<String, DriverView>>,
    changes: Changes,
    conditions: Conditions,
}

impl Sources {
    pub(super) fn new(changes: Changes, conditions: Conditions) -> Self {
        Self {
            views: RwLock::default(),
            changes,
            conditions,
        }
    }

    /// Changes the state of a source, and adds a new one.
    pub fn update(&self, kind: DriverKind, source: &str, change: impl FnOnce(&mut DriverView)) {
        let mut views = self.views.write();
        let view = views
            .entry(source.to_owned())
            .or_insert_with(|| DriverView::new(kind, source));
        let before = (view.state, view.reason.clone(), view.trust.clone());
        change(view);
        self.settle(view);
        let (now, name) = (view.state, view.called().to_owned());
        let changed = before != (now, view.reason.clone(), view.trust.clone());
        drop(views);
        if changed {
            self.report(name, now);
        }
    }

    /// Shows a driver of this process as serving, or as refused for a reason.
    pub fn show_own(&self, identity: &DriverIdentity, refused: Option<&str>) {
        let state = match refused {
            None => DriverState::Serving,
            Some(_) => DriverState::Failed,
        };
        let reason = refused.unwrap_or_default();
        self.update(identity.kind, &identity.source, |view| {
            if view.state != state {
                view.note(state.as_str(), reason, 0, None);
            }
            view.name = Some(identity.name.clone());
            view.summary.clone_from(&identity.summary);
            view.reason = reason.to_owned();
            view.state = state;
        });
    }

    /// Changes a source that there is, without a report. Its views are locked meanwhile.
    pub(super) fn change<T>(
        &self,
        source: &str,
        change: impl FnOnce(&mut DriverView) -> T,
    ) -> Option<T> {
        let mut views = self.views.write();
        let view = views.get_mut(source)?;
        let outcome = change(view);
        self.settle(view);
        Some(outcome)
    }

    /// Makes the conditions of a source as its state. Called with the views locked, so that an outdated one is not shown last.
    fn settle(&self, view: &DriverView) {
        self.conditions.update(
            ProblemCode::DevicesLeftOut,
            &view.source,
            devices_left_out(view),
        );
        // A file that is read again does not end the condition, the outcome does.
        if view.kind == DriverKind::Wasm && view.state.is_under_way() {
            return;
        }
        // That condition says more of the same source.
        let is_reported = self
            .conditions
            .is_set(ProblemCode::DriverNameTaken, &view.source);
        let problem = not_serving(view).filter(|_| !is_reported);
        self.conditions
            .update(ProblemCode::DriverNotServing, &view.source, problem);
    }

    pub(super) fn report(&self, driver: impl ToString, state: DriverState) {
        self.changes
            .report(ChangedKind::Driver, driver, state.as_str());
    }

    pub(super) fn remove(&self, source: &str) -> Option<DriverView> {
        let mut views = self.views.write();
        for code in [ProblemCode::DriverNotServing, ProblemCode::DevicesLeftOut] {
            self.conditions.clear(code, source);
        }
        views.remove(source)
    }

    pub(super) fn report_gone(&self, view: &DriverView) {
        self.changes
            .report(ChangedKind::Driver, view.called(), "gone");
    }

    /// Reports that devices of a driver changed.
    pub fn report_devices(&self, driver: &DriverName) {
        self.changes.report(ChangedKind::Device, driver, "changed");
    }

    /// Returns the reports of changes.
    pub fn changes(&self) -> &Changes {
        &self.changes
    }

    pub(super) fn view(&self, source: &str) -> Result<DriverView, Problem> {
        let gone = || Problem::not_found(ProblemCode::DriverUnknown, format!("{source} is gone"));
        self.views.read().get(source).cloned().ok_or_else(gone)
    }

    /// Returns every source, sorted by name.
    pub(super) fn views(&self) -> Vec<DriverView> {
        self.views.read().values().cloned().collect()
    }

    /// Returns the first source of a name.
    pub(super) fn of_name(&self, name: &str) -> Option<DriverView> {
        let views = self.views.read();
        let found = views.values().find(|view| view.is_named(name));
        found.cloned()
    }

    /// Returns the names of all sources with a known name.
    pub(super) fn names(&self) -> BTreeSet<DriverName> {
        let views = self.views.read();
        views
            .values()
            .filter_map(|view| view.name.clone())
            .collect()
    }

    /// Returns whether a native plugin has a name.
    pub(super) fn has_plugin(&self, name: &DriverName) -> bool {
        let views = self.views.read();
        let mut plugins = views.values().filter(|view| view.kind == DriverKind::Grpc);
        plugins.any(|view| view.is_named(name.as_str()))
    }

    /// Returns whether a source of a name is in a transient state; `None`: no source has the name.
    pub(super) fn is_under_way(&self, name: &DriverName) -> Option<bool> {
        let views = self.views.read();
        let of_name = |view: &&DriverView| view.is_named(name.as_str());
        let mut known = views.values().filter(of_name).peekable();
        known.peek()?;
        Some(known.any(|view| view.state.is_under_way()))
    }

    /// Returns a source that is being loaded, and may be of any name.
    pub(super) fn nameless(&self) -> Option<String> {
        let views = self.views.read();
        let mut views = views.values();
        let nameless = views.find(|view| view.name.is_none() && view.state.is_under_way());
        nameless.map(|view| view.source.clone())
    }

    /// Returns the state of a source, unless a change locks it.
    #[cfg(test)]
    pub(super) fn try_state(&self, source: &str) -> Option<DriverState> {
        self.views.try_read().map(|views| views[source].state)
    }
}

/// Returns the problem of a driver that leaves out devices.
fn devices_left_out(view: &DriverView) -> Option<Problem> {
    let driver = format!("driver {}", view.called());
    left_out::problem(&view.left_out, &driver, &driver)
}

/// Returns the problem of a source that does not serve, or whose newest file does not. A quarantine has a condition of its own.
fn not_serving(view: &DriverView) -> Option<Problem> {
    let DriverView {
        name,
        kind,
        source,
        state,
        reason,
        ..
    } = view;
    let what = match state {
        DriverState::Failed | DriverState::Blocked | DriverState::Lost => {
            format!(" is {}", state.as_str())
        }
        // An older version serves instead of the file's, and the reason says so. That of a plugin is no fault.
        DriverState::Serving if *kind == DriverKind::Wasm && !reason.is_empty() => String::new(),
        _ => return None,
    };
    let subject = match name {
        Some(name) => format!("driver {name} ({source})"),
        None => source.clone(),
    };
    let why = match reason.as_str() {
        "" => String::new(),
        reason => format!(": {reason}"),
    };
    let message = format!("{subject}{what}{why}");
    Some(Problem::unavailable(ProblemCode::DriverNotServing, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::LeftOutDevice;

    fn view(state: DriverState, kind: DriverKind, reason: &str) -> DriverView {
        DriverView {
            name: Some(DriverName::new("gpu.example.com").unwrap()),
            state,
            reason: reason.to_owned(),
            ..DriverView::new(kind, "gpu.wasm")
        }
    }

    #[test]
    fn sources_that_do_not_serve_are_problems() {
        use DriverKind::{Grpc, Wasm};
        let message = |view: &DriverView| not_serving(view).map(|problem| problem.message);
        for (state, kind, reason, expected) in [
            (
                DriverState::Failed,
                Wasm,
                "no code",
                Some("driver gpu.example.com (gpu.wasm) is failed: no code"),
            ),
            (
                DriverState::Blocked,
                Wasm,
                "not granted: net",
                Some("driver gpu.example.com (gpu.wasm) is blocked: not granted: net"),
            ),
            (
                DriverState::Lost,
                Grpc,
                "",
                Some("driver gpu.example.com (gpu.wasm) is lost"),
            ),
            (
                DriverState::Serving,
                Wasm,
                "version 1 continues to serve",
                Some("driver gpu.example.com (gpu.wasm): version 1 continues to serve"),
            ),
            (DriverState::Serving, Wasm, "", None),
            (DriverState::Serving, Grpc, "registered", None),
            (DriverState::Quarantined, Wasm, "failures", None),
            (DriverState::Draining, Wasm, "", None),
        ] {
            let view = view(state, kind, reason);
            assert_eq!(message(&view).as_deref(), expected, "{state:?}");
        }
        let unknown = DriverView {
            name: None,
            ..view(DriverState::Failed, Wasm, "no code")
        };
        assert_eq!(
            message(&unknown).as_deref(),
            Some("gpu.wasm is failed: no code")
        );
    }

    #[test]
    fn condition_of_source_ends_with_outcome() {
        let conditions = Conditions::default();
        let sources = Sources::new(Changes::default(), conditions.clone());
        let set = |state: DriverState| {
            sources.update(DriverKind::Wasm, "gpu.wasm", |view| {
                view.state = state;
                view.reason = match state {
                    DriverState::Failed => "no code".to_owned(),
                    _ => String::new(),
                };
            });
        };
        let is_set = || conditions.is_set(ProblemCode::DriverNotServing, "gpu.wasm");
        set(DriverState::Seen);
        assert!(!is_set());
        set(DriverState::Failed);
        assert!(is_set());
        set(DriverState::Compiled);
        assert!(is_set(), "it has not served yet");
        set(DriverState::Serving);
        assert!(!is_set());
        set(DriverState::Failed);
        sources.remove("gpu.wasm");
        assert!(!is_set());

        let leave_out = |devices: Vec<LeftOutDevice>| {
            sources.update(DriverKind::Wasm, "gpu.wasm", |view| {
                view.left_out = LeftOut::of(devices);
            });
            conditions.is_set(ProblemCode::DevicesLeftOut, "gpu.wasm")
        };
        let console = LeftOutDevice::new("ttyS0", "it is a console");
        assert!(leave_out(vec![console.clone()]));
        assert!(!leave_out(Vec::new()));
        assert!(leave_out(vec![console]));
        sources.remove("gpu.wasm");
        assert_eq!(conditions.list(), []);

        // The name's condition is enough.
        let taken = Problem::conflict(ProblemCode::DriverNameTaken, "of another");
        conditions.set("gpu.wasm", taken);
        set(DriverState::Failed);
        assert!(!is_set());
    }
}
