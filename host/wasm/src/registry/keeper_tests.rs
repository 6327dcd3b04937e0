//! A poller of a driver's inventory whose driver is in quarantine.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::keeper::InventoryPoller;
use crate::kernel::KernelEvents;
use crate::tests::Stage;
use crate::tests::guest::Guest;
use nodedock_base::changes::Changes;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::Published;
use nodedock_core::registry::Registry;
use nodedock_model::{Inventory, Pool, PoolName};

const DEADLINE: Duration = Duration::from_secs(10);

/// Where a quarantine began between the question and the call, the look was forgotten, and with it the kernel's event.
#[tokio::test]
async fn a_look_that_a_quarantine_held_back_is_made_up_for_when_it_is_over() {
    let driver = Arc::new(Stage::new().load(&Guest::default()).await);
    let (tasks, kernel) = (Tasks::new(), KernelEvents::default());
    let pools = BTreeMap::from([(PoolName::new("node-1").unwrap(), Pool::default())]);
    let before = Published { inventory: Inventory { pools }, ..Published::default() };
    let (published, mut found) = watch::channel(Arc::new(before));
    let (registry, source) = (Registry::new(Changes::default()), "tiny.wasm".to_owned());
    let looker =
        InventoryPoller { registry, source, driver: driver.clone(), published }.start(&tasks, &kernel);

    driver.containment().fail();
    // Who asks is not asked whether there is a quarantine.
    looker.look().await;
    assert!(!found.has_changed().unwrap());
    assert!(driver.containment().resume());
    tokio::time::timeout(DEADLINE, found.changed()).await.expect("it is asked again").unwrap();
    assert_eq!(found.borrow().inventory, Inventory::default());
    assert!(tasks.drain(DEADLINE).await);
}
