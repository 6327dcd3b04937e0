//! Calls as a node makes them: seconds apart, so that caches, connections and cores are cold, and beside others that want the same cores.

use std::time::Duration;

use crate::busy::Busy;
use crate::calls::{Calls, ClusterNode, DeviceManager, NodeApi};
use crate::devices::{Node, ORDINARY};
use crate::table::{Table, Times};
use crate::{CdiOnTmpfs, Size, claims};

/// Time before a cold call in which nothing happens.
const IDLE: Duration = Duration::from_millis(500);
/// Calls without a pause for each cold one.
const WARM: usize = 4;

/// The conditions of a measured call.
#[derive(Clone, Copy)]
pub(crate) enum Condition {
    /// One call after the other.
    Warm,
    /// After a pause.
    Cold,
    /// After a pause, while threads of another process keep the cores busy.
    Busy,
}

impl Condition {
    pub(crate) const ALL: [Self; 3] = [Self::Warm, Self::Cold, Self::Busy];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Warm => "without a pause",
            Self::Cold => "after 500 ms",
            Self::Busy => "after 500 ms, busy machine",
        }
    }

    /// Makes the load of the condition, which ends with what is returned.
    pub(crate) fn begin(self) -> Option<Busy> {
        matches!(self, Self::Busy).then(Busy::start)
    }

    /// Waits as before each call.
    pub(crate) async fn pause(self) {
        match self {
            Self::Warm => {}
            Self::Cold | Self::Busy => tokio::time::sleep(IDLE).await,
        }
    }

    pub(crate) fn calls(self, size: Size) -> usize {
        match self {
            Self::Warm => size.cold * WARM,
            Self::Cold | Self::Busy => size.cold,
        }
    }
}

pub(crate) async fn run(size: Size, table: &mut Table) {
    let cdi = CdiOnTmpfs::new();
    let daemon = claims::daemon(&cdi).await;
    measure(&mut NodeApi(daemon.client()), size, table).await;
    drop(daemon);
    let node = ClusterNode::start().await;
    measure(&mut node.dra(), size, table).await;
    measure(&mut node.allocate().await, size, table).await;
    drop(node);
    let node = Node::start(ORDINARY).await;
    measure(&mut DeviceManager(node.client()), size, table).await;
}

async fn measure<C: Calls>(calls: &mut C, size: Size, table: &mut Table) {
    let mut numbers = 0..;
    for condition in Condition::ALL {
        let load = condition.begin();
        let (mut comes, mut goes) = (Times::default(), Times::default());
        for n in numbers.by_ref().take(condition.calls(size)) {
            calls.make_ready(n);
            condition.pause().await;
            comes.time(calls.come(n)).await;
            if C::GO.is_some() {
                condition.pause().await;
                goes.time(calls.go(n)).await;
            }
        }
        drop(load);
        row(table, C::COME, condition, &comes);
        if let Some(name) = C::GO {
            row(table, name, condition, &goes);
        }
    }
}

fn row(table: &mut Table, call: &str, condition: Condition, times: &Times) {
    let name = |condition: Condition| format!("cold: {call}, {}", condition.name());
    let note = match condition {
        Condition::Busy => "two threads of another process never wait",
        Condition::Warm | Condition::Cold => "",
    };
    table.times(&name(condition), times, &name(Condition::Warm), note);
}
