use std::time::Duration;

use super::super::keeper::Keeper;
use super::*;
use crate::base::tasks::Tasks;
use crate::discovery::kernel::KernelEvents;
use crate::driver::wasm::tests::Stage;
use crate::driver::wasm::tests::guest::Guest;

const DEADLINE: Duration = Duration::from_secs(10);

/// Where a quarantine began between the question and the call, the look was forgotten, and with it the kernel's event.
#[tokio::test]
async fn a_look_that_a_quarantine_held_back_is_made_up_for_when_it_is_over() {
    let driver = Arc::new(Stage::new().load(&Guest::default()).await);
    let (tasks, kernel) = (Tasks::new(), KernelEvents::default());
    let pools = BTreeMap::from([(PoolName::new("node-1").unwrap(), Pool::default())]);
    let before = Published { inventory: Inventory { pools }, ..Published::default() };
    let (published, mut found) = watch::channel(Arc::new(before));
    let (registry, source) = (registry(), "tiny.wasm".to_owned());
    let looker = Keeper { registry, source, driver: driver.clone(), published }.start(&tasks, &kernel);

    driver.containment().fail();
    // Who asks is not asked whether there is a quarantine.
    looker.look().await;
    assert!(!found.has_changed().unwrap());
    assert!(driver.containment().resume());
    tokio::time::timeout(DEADLINE, found.changed()).await.expect("it is asked again").unwrap();
    assert_eq!(found.borrow().inventory, Inventory::default());
    assert!(tasks.drain(DEADLINE).await);
}
