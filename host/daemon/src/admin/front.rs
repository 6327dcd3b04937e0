//! The probes of one instance of the daemon among several on a root: it lives while it waits for its turn, and is ready when it serves.
//!
//! The admin socket is that of the instance that serves; this one's is its own from its start to its end.

use std::sync::{Arc, Mutex, PoisonError};

use ::http::{Method, StatusCode};
use tokio::net::UnixListener;

use super::Admin;
use super::http::{self, Answer, Answers, Face};
use nodedock_base::tasks::Tasks;

#[derive(Clone)]
pub struct Front(Arc<Mutex<Standing>>);

#[derive(Clone)]
enum Standing {
    /// What it waits for.
    Waits(String),
    Serves(Arc<Face>),
}

impl Front {
    pub fn new(waits_for: &str) -> Self {
        Self(Arc::new(Mutex::new(Standing::Waits(waits_for.to_owned()))))
    }

    /// It does not serve; `why` is told to who asks whether it is ready.
    pub fn stand_by(&self, why: &str) {
        self.set(Standing::Waits(why.to_owned()));
    }

    /// It serves.
    pub fn serve(&self, admin: Admin) {
        self.set(Standing::Serves(Arc::new(Face::new(admin))));
    }

    fn set(&self, standing: Standing) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = standing;
    }

    fn standing(&self) -> Standing {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Answers for Front {
    async fn answer(&self, method: &Method, path: &str) -> Answer {
        match (self.standing(), path) {
            (Standing::Serves(face), _) => face.answer(method, path).await,
            (Standing::Waits(_), _) if method != Method::GET => http::only_get(),
            (Standing::Waits(_), "/livez") => http::told(Vec::new()),
            (Standing::Waits(why), "/readyz") => http::told(vec![why]),
            (Standing::Waits(why), _) => http::text(StatusCode::SERVICE_UNAVAILABLE, why + "\n"),
        }
    }
}

/// Serves until the tasks stop.
pub async fn serve_front(front: Front, socket: UnixListener, tasks: Tasks) {
    http::serve(Arc::new(front), socket, tasks).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_instance_that_waits_lives_and_is_not_ready() {
        let front = Front::new("it starts");
        let status = async |path: &str| front.answer(&Method::GET, path).await.status().as_u16();
        assert_eq!(
            (status("/livez").await, status("/readyz").await, status("/metrics").await),
            (200, 503, 503)
        );
        assert_eq!(front.answer(&Method::POST, "/livez").await.status().as_u16(), 405);
    }
}
