"""GET /v1/models: the names under which the model is served."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from paxserve.entrypoints.context import ServingContext, context_of, json_response
from paxserve.entrypoints.protocol.models import ModelCard, ModelList, ModelPermission

router = APIRouter()


def card(context: ServingContext, name: str) -> ModelCard:
    """The card of one served name."""
    return ModelCard(
        id=name,
        created=context.created,
        root=context.engine_config.model.model,
        max_model_len=context.model_info.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{context.digest}", created=context.created)],
    )


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Every name that the server knows."""
    context = context_of(request)
    return json_response(ModelList([card(context, name) for name in context.model_names]))


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> Response:
    """One name."""
    context = context_of(request)
    return json_response(card(context, context.model_name(name)))
