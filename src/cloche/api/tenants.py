"""Tenants, what each may have, and what it has."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body

from cloche.api.answers.tenants import OVERRIDES, TenantQuota, Tenants, TenantUsage
from cloche.api.auth import Admin, Reader
from cloche.api.described import answer
from cloche.api.parameters import TenantName
from cloche.api.services import Services, Use
from cloche.core.quota import Month, Quota

router = APIRouter(prefix="/v1", tags=["tenants"])

Wanted = Annotated[Quota, Body(openapi_examples={"more": {"value": OVERRIDES}})]


@router.get("/usage", operation_id="getUsage", responses=answer(TenantUsage))
async def usage(caller: Reader, services: Use) -> dict[str, Any]:
    """Tell what the caller's tenant has, and what it may have."""
    return await _view(caller.tenant, services)


@router.get("/tenants", operation_id="listTenants", responses=answer(Tenants))
async def tenants(caller: Admin, services: Use) -> dict[str, Any]:
    """List every tenant: any name that has a key, a job, a quota or something in store."""
    return {
        "tenants": [
            {
                "tenant": tenant.name,
                "keys": tenant.keys,
                "used": asdict(tenant.usage),
                "overrides": dict(tenant.overrides),
            }
            for tenant in await services.quotas.tenants()
        ]
    }


@router.get("/tenants/{tenant}/quota", operation_id="getQuota", responses=answer(TenantQuota))
async def get_quota(tenant: TenantName, caller: Admin, services: Use) -> dict[str, Any]:
    """Tell what a tenant may have, and what it has."""
    overrides = dict(await services.quotas.overrides(tenant))
    return {**await _view(tenant, services), "overrides": overrides}


@router.put("/tenants/{tenant}/quota", operation_id="setQuota", responses=answer(TenantQuota))
async def put_quota(
    tenant: TenantName, wanted: Wanted, caller: Admin, services: Use
) -> dict[str, Any]:
    """Let a tenant's quota differ from the default in these values; null is no limit."""
    values = wanted.model_dump(exclude_unset=True)
    await services.quotas.override(tenant, values)
    services.gate.forget_rates()
    await services.access.audit(caller, "quota.set", tenant, **values)
    return await get_quota(tenant, caller, services)


@router.delete("/tenants/{tenant}/quota", operation_id="resetQuota", responses=answer(TenantQuota))
async def delete_quota(tenant: TenantName, caller: Admin, services: Use) -> dict[str, Any]:
    """Give a tenant the server's default quota again."""
    await services.quotas.override(tenant, {})
    services.gate.forget_rates()
    await services.access.audit(caller, "quota.reset", tenant)
    return await get_quota(tenant, caller, services)


async def _view(tenant: str, services: Services) -> dict[str, Any]:
    month = Month.of(datetime.now(UTC))
    return {
        "tenant": tenant,
        "quota": (await services.quotas.of(tenant)).model_dump(),
        "used": asdict(await services.quotas.usage(tenant)),
        "month": {"since": month.since.isoformat(), "until": month.until.isoformat()},
    }
