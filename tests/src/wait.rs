//! Waiting for what the daemon, or the kernel, tells.

use nodedock_proto::node::v1;
use tokio::time::timeout;
use tonic::Status;

use crate::drivers::Form;
use crate::node_api::{Client, NodeApi};
pub use crate::until::until_path;
use crate::{DEADLINE, Root};

impl NodeApi {
    /// Returns what `condition` finds, asking again at each event of the daemon. An error of it is the state that was seen,
    /// for the message of a failure.
    pub async fn until<T>(
        &self,
        what: &str,
        condition: impl AsyncFn(Client) -> Result<T, String>,
    ) -> T {
        self.try_until(what, condition).await.expect("watch")
    }

    /// The same with a daemon that may die meanwhile; then the error says how that looks to a client.
    pub async fn try_until<T>(
        &self,
        what: &str,
        condition: impl AsyncFn(Client) -> Result<T, String>,
    ) -> Result<T, Status> {
        let mut last = "nothing".to_owned();
        let found = timeout(DEADLINE, find(self.client(), condition, &mut last)).await;
        found.unwrap_or_else(|_| panic!("waited in vain until {what}; last seen: {last}"))
    }

    /// Returns the driver of a file as soon as it is as wanted.
    pub async fn until_driver(
        &self,
        file: &str,
        wanted: impl Fn(&v1::Driver) -> bool,
    ) -> v1::Driver {
        self.try_until_driver(file, wanted).await.expect("watch")
    }

    /// The same with a daemon that may die meanwhile.
    pub async fn try_until_driver(
        &self,
        file: &str,
        wanted: impl Fn(&v1::Driver) -> bool,
    ) -> Result<v1::Driver, Status> {
        self.try_until(&format!("{file} is as wanted"), async |mut client| {
            let found = driver(&mut client, file).await?.ok_or("no such driver")?;
            if wanted(&found) {
                Ok(found)
            } else {
                Err(format!("{} {}", found.state, found.reason))
            }
        })
        .await
    }

    /// Waits until no claim is on the node.
    pub async fn until_no_claims(&self) {
        self.until("no claim is on the node", async |mut client| {
            let answer = client.list_claims(v1::ListClaimsRequest::default()).await;
            let claims = answer
                .map_err(|status| status.to_string())?
                .into_inner()
                .claims;
            if claims.is_empty() {
                Ok(())
            } else {
                Err(format!("{claims:?}"))
            }
        })
        .await;
    }

    /// Returns an extended resource as soon as it is as wanted.
    pub async fn until_resource(
        &self,
        name: &str,
        wanted: impl Fn(&v1::Resource) -> bool,
    ) -> v1::Resource {
        self.until(&format!("{name} is as wanted"), async |mut client| {
            let answer = client.get_capacity(v1::GetCapacityRequest {}).await;
            let resources = answer
                .map_err(|status| status.to_string())?
                .into_inner()
                .resources;
            let found = resources.into_iter().find(|resource| resource.name == name);
            let found = found.ok_or("no such resource")?;
            if wanted(&found) {
                Ok(found)
            } else {
                Err(format!("{found:?}"))
            }
        })
        .await
    }

    /// Returns an extended resource as soon as a source serves it with so many healthy devices.
    pub async fn until_allocatable(&self, name: &str, count: usize) -> v1::Resource {
        let wanted =
            |resource: &v1::Resource| resource.active && resource.allocatable as usize == count;
        self.until_resource(name, wanted).await
    }

    pub async fn until_state(&self, file: &str, state: &str) -> v1::Driver {
        self.until_driver(file, |driver| driver.state == state)
            .await
    }

    pub async fn until_serving(&self, file: &str) -> v1::Driver {
        self.until_state(file, "serving").await
    }

    /// Installs an example driver, and waits until it serves.
    pub async fn serve(&self, driver: &str, form: Form) -> v1::Driver {
        self.install(driver, form);
        self.until_serving(&format!("{driver}.wasm")).await
    }

    /// Waits until the driver of a file has failed with a reason that has these parts. A driver may fail for another reason before,
    /// when its files were read half written.
    pub async fn until_failed(&self, file: &str, parts: &[&str]) -> v1::Driver {
        let wanted = |driver: &v1::Driver| {
            driver.state == "failed" && parts.iter().all(|part| driver.reason.contains(part))
        };
        self.until_driver(file, wanted).await
    }

    pub async fn until_gone(&self, file: &str) {
        self.until(&format!("{file} is gone"), async |mut client| {
            driver(&mut client, file)
                .await?
                .map_or(Ok(()), |driver| Err(driver.state))
        })
        .await;
    }

    /// Waits until the claims are as wanted, and returns them.
    pub async fn until_claims(
        &self,
        what: &str,
        wanted: impl Fn(&[v1::ClaimStatus]) -> bool,
    ) -> Vec<v1::ClaimStatus> {
        self.until(what, async |mut client| {
            let answer = client.list_claims(v1::ListClaimsRequest::default()).await;
            let claims = answer
                .map_err(|status| status.to_string())?
                .into_inner()
                .claims;
            if wanted(&claims) {
                Ok(claims)
            } else {
                Err(format!("{claims:?}"))
            }
        })
        .await
    }

    /// Waits until the codes of what is wrong with the node are these.
    pub async fn until_conditions(&self, codes: &[&str]) -> Vec<v1::Condition> {
        self.until(
            &format!("the node's problems are {codes:?}"),
            async |mut client| {
                let answer = client
                    .get_node(v1::GetNodeRequest {})
                    .await
                    .map_err(|status| status.to_string())?;
                let conditions = answer.into_inner().conditions;
                let found = conditions
                    .iter()
                    .flat_map(|condition| &condition.problem)
                    .map(|problem| &problem.code);
                if found.eq(codes) {
                    Ok(conditions)
                } else {
                    Err(format!("{conditions:?}"))
                }
            },
        )
        .await
    }

    /// Waits until a device is published, or (`there` false) is no longer.
    pub async fn until_device(&self, pool: &str, name: &str, there: bool) {
        let what = format!("{pool}/{name} is {}", if there { "there" } else { "gone" });
        self.until(&what, async |mut client| {
            let answer = client.list_devices(v1::ListDevicesRequest::default()).await;
            let devices = answer
                .map_err(|status| status.to_string())?
                .into_inner()
                .devices;
            let found = devices
                .iter()
                .any(|device| own_pool(&device.pool) == pool && device.name == name);
            if found == there {
                Ok(())
            } else {
                Err(format!("{} devices", devices.len()))
            }
        })
        .await;
    }
}

/// Looks at each event until the condition finds something.
async fn find<T>(
    mut client: Client,
    condition: impl AsyncFn(Client) -> Result<T, String>,
    last: &mut String,
) -> Result<T, Status> {
    loop {
        // Listening begins before the question, so that no change falls between them.
        let mut events = client.watch(v1::WatchRequest {}).await?.into_inner();
        loop {
            match condition(client.clone()).await {
                Ok(found) => return Ok(found),
                Err(state) => *last = state,
            }
            // Else the watch fell behind, or the daemon is another one.
            let Ok(Some(_)) = events.message().await else {
                break;
            };
        }
    }
}

/// The driver's own name of a pool `NODE/POOL`.
pub fn own_pool(pool: &str) -> &str {
    pool.split_once('/').map_or(pool, |(_, own)| own)
}

/// The driver of a file.
async fn driver(client: &mut Client, file: &str) -> Result<Option<v1::Driver>, String> {
    let answer = client
        .list_drivers(v1::ListDriversRequest {
            name: file.to_owned(),
        })
        .await;
    Ok(answer
        .map_err(|status| status.to_string())?
        .into_inner()
        .drivers
        .into_iter()
        .next())
}

impl Root {
    /// Waits until the log has a text.
    pub async fn until_log(&self, text: &str) {
        let has = || {
            self.log()
                .contains(text)
                .then_some(())
                .ok_or_else(|| self.log())
        };
        until_path(&self.log_path(), &format!("the log says {text:?}"), has).await;
    }
}
