//! The steps of a registration, as in a kubelet: dial, GetInfo, NotifyRegistrationStatus. The connection is closed afterwards: the
//! connection to the service's socket shows whether the plugin is alive.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nodedock_proto::kubelet::registration::registration_client::RegistrationClient;
use tonic::Status;
use tonic::transport::Channel;

use super::connection::{DialError, dial};
use super::{clean, convert};
use nodedock_model::limit;

/// A plugin's GetInfo response, unchecked except for its size.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginInfo {
    pub kind: String,
    pub name: String,
    /// Endpoint; empty: the registration socket itself.
    pub endpoint: PathBuf,
    pub services: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum RegistrarError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("{step}: no answer within {} ms", deadline.as_millis())]
    Deadline { step: &'static str, deadline: Duration },
    #[error("{step}: {text}")]
    Refused { step: &'static str, text: String },
}

/// Deadline of each step.
#[derive(Debug, Clone, Copy)]
pub struct StepTimes {
    pub dial: Duration,
    pub info: Duration,
    pub notify: Duration,
}

impl Default for StepTimes {
    fn default() -> Self {
        Self { dial: limit::PLUGIN_DIAL, info: limit::PLUGIN_INFO, notify: limit::PLUGIN_NOTIFY }
    }
}

/// A connection to a registration socket.
pub struct Registrar {
    client: RegistrationClient<Channel>,
    times: StepTimes,
}

impl Registrar {
    pub async fn dial(socket: &Path, times: StepTimes) -> Result<Self, RegistrarError> {
        let (channel, _ended) = dial(socket, times.dial).await?;
        let client = RegistrationClient::new(channel).max_decoding_message_size(limit::PLUGIN_INFO_BYTES_MAX);
        Ok(Self { client, times })
    }

    /// Calls GetInfo.
    pub async fn info(&mut self) -> Result<PluginInfo, RegistrarError> {
        let request = convert::info_request(self.times.info);
        let answer = within("GetInfo", self.times.info, self.client.get_info(request)).await?;
        Ok(convert::plugin_info(answer))
    }

    /// Notifies the plugin that it is registered. An error of the plugin reverts the registration.
    pub async fn accept(&mut self) -> Result<(), RegistrarError> {
        self.notify(true, "").await
    }

    /// Notifies the plugin why it is not registered.
    pub async fn refuse(&mut self, why: &str) -> Result<(), RegistrarError> {
        self.notify(false, why).await
    }

    async fn notify(&mut self, registered: bool, error: &str) -> Result<(), RegistrarError> {
        let request = convert::registration_status(registered, error, self.times.notify);
        let call = self.client.notify_registration_status(request);
        within("NotifyRegistrationStatus", self.times.notify, call).await.map(drop)
    }
}

async fn within<T>(
    step: &'static str,
    deadline: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, RegistrarError> {
    match tokio::time::timeout(deadline, call).await {
        Err(_) => Err(RegistrarError::Deadline { step, deadline }),
        Ok(Err(status)) => {
            let text = format!("{:?}: {}", status.code(), clean(status.message()));
            Err(RegistrarError::Refused { step, text })
        }
        Ok(Ok(answer)) => Ok(answer.into_inner()),
    }
}
