//! Who belongs to a job: its own certificate authority, a certificate for every member, and tokens.

use crate::{Error, Result};
use deuteron_collective::{Identity, SERVER_NAME};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use std::{fmt, io};

/// A secret that only one member and the supervisor know.
pub(crate) type Token = [u8; 16];

pub(crate) fn token() -> Result<Token> {
    let mut token = [0; 16];
    getrandom(&mut token, GetRandomFlags::empty())
        .map_err(|error| Error::system("no random numbers", error))?;
    Ok(token)
}

/// Signs the certificates of one job; its key never leaves the supervisor's memory.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

/// One member's certificate and key, and the authority's certificate, as PEM.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Credentials {
    authority: String,
    certificate: String,
    key: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials(..)")
    }
}

impl Authority {
    pub fn new() -> Result<Self> {
        let mut params = CertificateParams::new(Vec::new()).map_err(failed)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().map_err(failed)?;
        CertifiedIssuer::self_signed(params, key).map(Self).map_err(failed)
    }

    /// A new member. The certificate proves membership of the job, and can call and be called.
    pub fn issue(&self) -> Result<Credentials> {
        let key = KeyPair::generate().map_err(failed)?;
        let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()]).map_err(failed)?;
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, &self.0).map_err(failed)?;
        Ok(Credentials {
            authority: self.0.pem(),
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }
}

impl Credentials {
    pub fn identity(&self) -> Result<Identity> {
        let Self { authority, certificate, key } = self;
        Ok(Identity::from_pem(authority.as_bytes(), certificate.as_bytes(), key.as_bytes())?)
    }
}

fn failed(error: rcgen::Error) -> Error {
    Error::system("a certificate cannot be made", io::Error::other(error))
}
