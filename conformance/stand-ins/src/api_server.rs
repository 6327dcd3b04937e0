//! An API server for tests: the engine of `nodedock-apiserver`, with faults, denied requests, and a record of requests around it.
//!
//! It answers as Kubernetes 1.36 does: its tests compare it with recorded exchanges, and the test `kubernetes stand_in` with a real
//! server. Nothing controls its objects but requests and the methods here: no scheduler, no garbage collector, and every namespace is
//! taken to be there. Beside `v1`, it serves versions of resource.k8s.io before it, by conversion.

use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use serde_json::Value;
use tokio::net::TcpSocket;

mod cluster;
mod convert;
mod fault;
mod objects;
mod seen;
mod serve;
mod state;
#[cfg(test)]
mod tests;

pub use cluster::{Allocated, Pod};
pub use fault::{Fault, FaultId, When};
pub use seen::Seen;
pub use serve::Broken;
pub use state::State;

use crate::deadline::{DEADLINE, within};
use serve::Listening;
use state::Shared;

/// Returns a socket with a free port of 127.0.0.1, on which others of this process can listen.
fn reserve() -> io::Result<(TcpSocket, u16)> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind((Ipv4Addr::LOCALHOST, 0).into())?;
    let port = socket.local_addr()?.port();
    Ok((socket, port))
}

/// A server of its own objects. It ends when it is dropped.
#[derive(Debug)]
pub struct ApiServer {
    shared: Arc<Shared>,
    listening: Mutex<Option<Listening>>,
    port: u16,
    /// Has the port also while the server is stopped: no other program can take it, and no client gets it and connects to itself.
    _reserved: TcpSocket,
}

impl ApiServer {
    /// Serves on a free port of 127.0.0.1, resource.k8s.io in `v1` alone, to clients with any token or none.
    pub async fn start() -> Self {
        let shared = Arc::new(Shared::new().await);
        let (reserved, port) = reserve().expect("a port is free");
        let listening = Listening::on(port, Arc::clone(&shared)).await;
        Self {
            shared,
            port,
            listening: Mutex::new(Some(listening)),
            _reserved: reserved,
        }
    }

    /// `http://127.0.0.1:PORT`
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Answers a request without a connection: for tests with a paused clock, which advances while a task waits for a socket.
    pub async fn handle<B>(
        &self,
        request: http::Request<B>,
    ) -> Result<http::Response<UnsyncBoxBody<Bytes, Broken>>, Broken>
    where
        B: hyper::body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        serve::answer(Arc::clone(&self.shared), request).await
    }

    /// A kubeconfig file in `dir`, with the token that this server wants, if it wants one.
    pub fn kubeconfig(&self, dir: &Path) -> PathBuf {
        let token = self.shared.lock().tokens.first().cloned();
        let user = token.map_or(
            serde_json::json!({}),
            |token| serde_json::json!({ "token": token }),
        );
        let config = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "stand-in", "cluster": { "server": self.url() } }],
            "users": [{ "name": "driver", "user": user }],
            "contexts": [{ "name": "stand-in", "context": { "cluster": "stand-in", "user": "driver" } }],
            "current-context": "stand-in",
        });
        let path = dir.join("kubeconfig");
        std::fs::write(&path, format!("{config:#}\n"))
            .expect("the directory of a kubeconfig can be written");
        path
    }

    /// Refuses connections and closes the open ones, at once. The objects stay.
    pub async fn stop(&self) {
        let listening = self.listening().take();
        if let Some(listening) = listening {
            listening.stop().await;
        }
    }

    fn listening(&self) -> MutexGuard<'_, Option<Listening>> {
        self.listening
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Serves again, on the port it had.
    pub async fn start_again(&self) {
        self.stop().await;
        let listening = Listening::on(self.port, Arc::clone(&self.shared)).await;
        *self.listening() = Some(listening);
    }

    /// The versions of resource.k8s.io that are served, preferred first.
    pub fn serve_versions(&self, versions: &[&str]) {
        self.shared.change(|state| {
            state.served.versions = versions.iter().map(ToString::to_string).collect()
        });
    }

    /// Serves DeviceTaintRules from now on, as Kubernetes 1.37 does: in `v1`, `v1beta2` and `v1alpha3`, as far as these are served.
    pub fn serve_taint_rules(&self) {
        self.shared.change(|state| state.served.taint_rules = true);
    }

    /// Reports another minor version of Kubernetes 1, such as `34+`; what the server does stays the same.
    pub fn report_minor_version(&self, minor: &str) {
        self.shared
            .change(|state| minor.clone_into(&mut state.minor_version));
    }

    /// Refuses, from now on, every request that has none of these tokens: 401. None: anyone is let in.
    pub fn require_tokens(&self, tokens: &[&str]) {
        self.shared
            .change(|state| state.tokens = tokens.iter().map(ToString::to_string).collect());
    }

    /// Refuses `verb` on `resource` (`resourceclaims`, `resourceclaims/status`; `*` for each) as RBAC does: 403.
    pub fn deny(&self, verb: &str, resource: &str) {
        self.shared
            .change(|state| state.denied.push((verb.to_owned(), resource.to_owned())));
    }

    /// Ends what [`Self::deny`] and [`Self::enforce`] began.
    pub fn allow_all(&self) {
        self.shared.change(|state| {
            state.denied.clear();
            state.rules = None;
        });
    }

    /// Refuses what none of these rules covers; `rules` are as in a ClusterRole. Of what a driver may ask without any rule
    /// (discovery, `/version`, `/livez`), nothing is refused.
    pub fn enforce(&self, rules: &[Value]) {
        self.shared
            .change(|state| state.rules = Some(rules.to_vec()));
    }

    /// Injects a fault into requests that `when` matches, until it is lifted.
    pub fn fail(&self, fault: Fault, when: When) -> FaultId {
        self.shared
            .change(|state| state.faults.add(fault, when, None))
    }

    /// Injects a fault into the next `times` requests that `when` matches.
    pub fn fail_times(&self, times: usize, fault: Fault, when: When) -> FaultId {
        self.shared
            .change(|state| state.faults.add(fault, when, Some(times)))
    }

    pub fn lift(&self, fault: FaultId) {
        self.shared.change(|state| state.faults.lift(fault));
    }

    pub fn lift_all(&self) {
        self.shared.change(|state| state.faults.lift_all());
    }

    /// Forgets the changes until now: a watch that would resume from one of them gets 410 and lists again.
    pub fn compact(&self) {
        self.shared.server.forget_history();
    }

    /// Sends every watch that asked for bookmarks one, at once. They also come every minute.
    pub fn bookmark(&self) {
        self.shared.server.send_bookmarks();
    }

    /// Ends every watch in order, as a server does that has had enough of it.
    pub fn close_watches(&self) {
        self.shared.server.end_watches();
    }

    /// Raises the resource version as other people's objects do.
    pub fn skip_versions(&self, count: u64) {
        self.shared.server.skip_versions(count);
    }

    /// Looks at everything at once.
    pub fn look<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.shared.lock())
    }

    /// Every request since the start or the last [`Self::forget_requests`], in the order of their answers.
    pub fn requests(&self) -> Vec<Seen> {
        self.look(|state| state.requests().to_vec())
    }

    pub fn forget_requests(&self) {
        self.shared.change(|state| state.requests.clear());
    }

    /// Waits until `look` finds what it wants, after each request, change of an object and watch that opens or ends.
    ///
    /// # Panics
    ///
    /// After [`DEADLINE`] on the wall clock, with what was seen.
    pub async fn wait_for<T>(&self, what: &str, mut look: impl FnMut(&State) -> Option<T>) -> T {
        let [mut requests, mut objects] = self.shared.ticks();
        let work = async {
            loop {
                requests.mark_unchanged();
                objects.mark_unchanged();
                if let Some(found) = look(&self.shared.lock()) {
                    return found;
                }
                tokio::select! {
                    _ = requests.changed() => {}
                    _ = objects.changed() => {}
                }
            }
        };
        match within(DEADLINE, work).await {
            Some(found) => found,
            None => {
                panic!(
                    "waited {DEADLINE:?} for {what}; the API server saw:\n{}",
                    self.look(State::story)
                )
            }
        }
    }

    /// Waits as [`Self::wait_for`] does, for a condition without a result.
    pub async fn wait_until(&self, what: &str, mut look: impl FnMut(&State) -> bool) {
        self.wait_for(what, |state| look(state).then_some(())).await;
    }
}
