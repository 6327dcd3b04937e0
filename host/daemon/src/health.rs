//! `grpc.health.v1.Health` on the node API's socket. The service "" serves as soon as the API answers; the node API is not serving
//! while the checkpoint takes no writes, because no claim can be prepared or unprepared then.

use tokio::sync::watch;
use tonic::server::NamedService;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use nodedock_base::tasks::Tasks;

/// Reports the health of the service `S` until the tasks stop, and then ends the watches of it.
pub(super) async fn report<S: NamedService>(
    mut reporter: HealthReporter,
    mut takes_writes: watch::Receiver<bool>,
    tasks: Tasks,
) {
    loop {
        let serves = *takes_writes.borrow_and_update();
        let status = if serves {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        reporter.set_service_status(S::NAME, status).await;
        tokio::select! {
            () = tasks.stopped() => break,
            // A change that is missed here is seen in the next turn of the loop.
            changed = takes_writes.changed() => if changed.is_err() { break },
        }
    }
    // An open watch would keep the server from ending.
    for service in ["", S::NAME] {
        reporter.clear_service_status(service).await;
    }
}
