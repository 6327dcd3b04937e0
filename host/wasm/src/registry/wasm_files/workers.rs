//! The workers of the drivers directory, by the names of their files without `.wasm`.
//!
//! A file that is gone may come back while its worker still runs. The worker of the new file begins when that one has ended, because a
//! worker takes its driver out of service at its end.

use std::collections::HashMap;

use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{mpsc, oneshot};

use super::Order;
use crate::file_watch::DriverFiles;
use nodedock_core::registry::{ReloadRequest, spare_place};

/// Resolves, with an error, when a worker has ended.
pub(super) type Ended = oneshot::Receiver<()>;

pub(super) struct Handle {
    pub(super) orders: mpsc::Sender<Order>,
    pub(super) ended: Ended,
}

#[derive(Default)]
pub(super) struct Workers {
    at_work: HashMap<String, Handle>,
    /// Workers whose file is gone.
    leaving: HashMap<String, Ended>,
}

impl Workers {
    /// Has a file's worker load it; `start` makes a worker where there is none, which begins when the one before has ended.
    pub(super) async fn load(
        &mut self,
        files: DriverFiles,
        start: impl FnOnce(&str, Option<Ended>) -> Handle,
    ) {
        let Self { at_work, leaving } = self;
        let stem = files.stem.clone();
        let started = || start(&stem, leaving.remove(&stem));
        let worker = at_work.entry(stem.clone()).or_insert_with(started);
        tell(worker, Order::Load(files)).await;
    }

    /// Reports to a file's worker that the file is gone.
    pub(super) async fn leave(&mut self, stem: String) {
        self.leaving.retain(|_, ended| ended.try_recv() == Err(TryRecvError::Empty));
        if let Some(worker) = self.at_work.remove(&stem) {
            tell(&worker, Order::Gone).await;
            self.leaving.insert(stem, worker.ended);
        }
    }

    /// Has one worker load its file again, if there is one.
    pub(super) fn reload(&self, stem: &str, request: ReloadRequest) {
        if let Some(worker) = self.at_work.get(stem) {
            request.hand_to(&worker.orders, |done| Order::Again(Some(done)));
        }
    }

    /// Has all workers check their files again, but those whose queue is full: they will.
    pub(super) fn look_again(&self) {
        for place in self.at_work.values().filter_map(|worker| spare_place(&worker.orders)) {
            place.send(Order::Again(None));
        }
    }

    pub(super) async fn tell_all(&self, order: impl Fn() -> Order) {
        for worker in self.at_work.values() {
            tell(worker, order()).await;
        }
    }
}

async fn tell(worker: &Handle, order: Order) {
    // An error means that the worker stopped with the tasks.
    worker.orders.send(order).await.ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(stem: &str) -> DriverFiles {
        let wasm = format!("/drivers/{stem}.wasm").into();
        DriverFiles { stem: stem.to_owned(), wasm, grant: None, config: None, signature: None }
    }

    /// A simulated worker.
    struct Played {
        orders: mpsc::Receiver<Order>,
        end: oneshot::Sender<()>,
        before: Option<Ended>,
    }

    async fn load(workers: &mut Workers, stem: &str) -> Option<Played> {
        let mut played = None;
        let start = |_: &str, before| {
            let ((sender, orders), (end, ended)) = (mpsc::channel(8), oneshot::channel());
            played = Some(Played { orders, end, before });
            Handle { orders: sender, ended }
        };
        workers.load(files(stem), start).await;
        played
    }

    #[tokio::test]
    async fn a_worker_follows_the_one_that_leaves_and_who_has_left_is_forgotten() {
        let mut workers = Workers::default();
        let mut first = load(&mut workers, "a").await.unwrap();
        assert!(first.before.is_none() && load(&mut workers, "a").await.is_none());
        workers.leave("a".to_owned()).await;
        let told: Vec<_> = std::iter::from_fn(|| first.orders.try_recv().ok()).collect();
        assert!(matches!(told[..], [Order::Load(_), Order::Load(_), Order::Gone]));

        let mut second = load(&mut workers, "a").await.unwrap();
        let before = second.before.as_mut().unwrap();
        assert_eq!(before.try_recv(), Err(TryRecvError::Empty));
        drop(first.end);
        assert_eq!(before.try_recv(), Err(TryRecvError::Closed));

        workers.leave("a".to_owned()).await;
        drop(second);
        workers.leave("b".to_owned()).await;
        assert!(workers.leaving.is_empty() && load(&mut workers, "a").await.unwrap().before.is_none());
    }

    #[tokio::test]
    async fn who_has_no_worker_is_not_told_and_all_others_are() {
        let mut workers = Workers::default();
        let mut worker = load(&mut workers, "a").await.unwrap();
        workers.leave("b".to_owned()).await;
        workers.look_again();
        workers.tell_all(|| Order::Judge).await;
        for stem in ["a", "b"] {
            let (done, _) = oneshot::channel();
            workers.reload(stem, ReloadRequest { source: format!("{stem}.wasm"), done });
        }
        let told: Vec<_> = std::iter::from_fn(|| worker.orders.try_recv().ok()).collect();
        assert!(matches!(
            told[..],
            [Order::Load(_), Order::Again(None), Order::Judge, Order::Again(Some(_))]
        ));
    }
}
