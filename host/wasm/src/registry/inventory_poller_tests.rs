//! An inventory poller whose driver is in quarantine.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::inventory_poller;
use crate::kernel::KernelEvents;
use crate::tests::Stage;
use crate::tests::guest::Guest;
use nodedock_base::changes::Changes;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::Published;
use nodedock_core::registry::Registry;
use nodedock_model::{Inventory, Pool, PoolName};

const DEADLINE: Duration = Duration::from_secs(10);

/// Covers a quarantine that began between the check and the call: the poller forgot the discovery, and with it the kernel's event.
#[tokio::test]
async fn refused_discovery_is_repeated_after_quarantine() {
    let driver = Arc::new(Stage::new().load(&Guest::default()).await);
    let (tasks, kernel) = (Tasks::new(), KernelEvents::default());
    let pools = BTreeMap::from([(PoolName::new("node-1").unwrap(), Pool::default())]);
    let before = Published {
        inventory: Inventory { pools },
        ..Published::default()
    };
    let (published, mut found) = watch::channel(Arc::new(before));
    let registry = Registry::new(
        Changes::default(),
        nodedock_base::conditions::Conditions::default(),
        None,
    );
    let requests = inventory_poller::start(
        &registry,
        "tiny.wasm",
        driver.clone(),
        published,
        &tasks,
        &kernel,
    );

    driver.containment().fail();
    // A request is not checked against the quarantine.
    requests.discover().await;
    assert!(!found.has_changed().unwrap());
    assert!(driver.containment().resume());
    tokio::time::timeout(DEADLINE, found.changed())
        .await
        .expect("it is repeated")
        .unwrap();
    assert_eq!(found.borrow().inventory, Inventory::default());
    assert!(tasks.drain(DEADLINE).await);
}
